"""Wrong predictions make no decision worse than none, which is what `predictor: constant` gives.

    decision that reads a prediction                                  figure
    order of best-effort prompts and decodes (level, what remains)    mean completion of documents
    who joins, and who leaves when memory is short (expected waits)   the same with little memory; preemptions
    the decode worker that has room for the upper estimate            the same behind a prefill worker
    whose pages become int8 (expected waits)                          the same with a small pool and compression
    admission by memory, and the worker with fewest tokens (uppers)   chats that attain

The plan of a best-effort request reads no prediction any more (scheduling/dues.py): the last test is of that. Lines
of batch jobs are predicted by other lines of their job.

The predictor has learnt lengths that have nothing to do with the prompts, or those of the opposite prompts, and has to
find out by itself, while the first outputs end. Runs are small, and chance turns other decisions in them: hence the
tolerances.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import mean

import pytest

from alignedserve.core import ServiceClass, Slo
from alignedserve.lab.loads.figures.request_figures import attains, end_to_end_s
from alignedserve.lab.loads.records.records import RequestRecord, RunRecord
from alignedserve.scheduling.form_rules import Compression
from tests.conftest import SOAK
from tests.rare import rare, rarely
from tests.simulator.lessons import Lesson, arrivals, played, settings_of_cluster

WRONG = pytest.mark.parametrize("lesson", [Lesson.REVERSED, rarely(Lesson.USELESS)])
OF_RIGHT_AND_WRONG = pytest.mark.parametrize(
    "lesson", [Lesson.LEARNT, *map(rarely, [Lesson.USELESS, Lesson.REVERSED, Lesson.PERFECT])]
)
SEEDS, CHATS, DOCUMENTS, WINDOWS, BEHIND = (2, 600, 200, 200, 100) if SOAK else (1, 80, 120, 120, 40)
FEW_TOKENS = 16_000  # of KV on each device: some twenty requests
WINDOW_S = 12.0  # in which not all documents can be served
SLOWER, BEFORE_OUTPUTS_END, MORE_LATE, MORE_PREEMPTED = 1.05, 1.25, 0.025, 10
FEWER_CHATS, FEWER_TOKENS = 0.05, 0.85  # over capacity a message more or less moves them by half as much


@cache
def documents(lesson: Lesson, tokens: int | None = None, number: int = DOCUMENTS) -> RunRecord:
    """Play documents that all come at once."""
    asked = arrivals(number, ServiceClass.BE, 0, most_prompt=600)
    return played(settings_of_cluster("2xcolocated", tokens), lesson, list(asked))


@cache
def windows(lesson: Lesson) -> RunRecord:
    """Play documents of which not all can end within their windows."""
    asked = arrivals(WINDOWS, ServiceClass.BE, 0, rate=15.0, slo=Slo(jct_s=WINDOW_S))
    return played(settings_of_cluster("2xcolocated"), lesson, list(asked))


@cache
def behind_prefill(lesson: Lesson) -> RunRecord:
    asked = arrivals(BEHIND, ServiceClass.BE, 0, rate=8.0, most_prompt=600)
    return played(settings_of_cluster("1+2", FEW_TOKENS), lesson, list(asked))


@cache
def compressed(lesson: Lesson) -> RunRecord:
    settings = settings_of_cluster("1+1", FEW_TOKENS)
    policy = replace(settings.policy, compression=Compression.AUTO)
    settings = replace(settings, policy=policy, num_pages=settings.num_pages // 8, extents=None)
    return played(settings, lesson, list(arrivals(100, ServiceClass.BE, 0, rate=5.0, most_prompt=600)))


@cache
def chats(lesson: Lesson) -> list[RequestRecord]:
    """Play more chats than there is memory for; with two seeds where each wrong prediction is tried."""
    records = (
        played(settings_of_cluster("2xcolocated", FEW_TOKENS), lesson, list(asked))
        for asked in (arrivals(CHATS, ServiceClass.RT, seed, rate=12.0, most_prompt=400) for seed in range(SEEDS))
    )
    return [request for record in records for request in record.requests]


def completion_s(record: RunRecord) -> float:
    return mean(map(end_to_end_s, record.requests))


def kept(record: RunRecord) -> float:
    return mean(end_to_end_s(request) <= request.slo.jct_s for request in record.requests)


def tokens(requests: list[RequestRecord]) -> int:
    return sum(len(request.token_at) for request in requests)


def preempted(record: RunRecord) -> int:
    return sum(request.num_preempted for request in record.requests)


@rare  # the same decisions, where memory is short, are tried in each run
@WRONG
def test_documents_end_as_early_and_are_preempted_as_seldom(lesson: Lesson) -> None:
    wrong, none = documents(lesson), documents(Lesson.NOTHING)
    assert completion_s(wrong) <= SLOWER * completion_s(none)
    assert preempted(wrong) <= preempted(none) + MORE_PREEMPTED


@rare
@pytest.mark.parametrize(("lesson", "slower"), [(Lesson.REVERSED, BEFORE_OUTPUTS_END), (Lesson.USELESS, SLOWER)])
def test_where_memory_is_short_too(lesson: Lesson, slower: float) -> None:
    """A fifth of these documents has a seat before the first output ends: until then nobody knows of the reversal."""
    number = DOCUMENTS if SOAK else 48
    wrong, none = (documents(each, FEW_TOKENS, number) for each in (lesson, Lesson.NOTHING))
    assert completion_s(wrong) <= slower * completion_s(none)


@rare
@WRONG
def test_documents_behind_a_prefill_worker_end_as_early(lesson: Lesson) -> None:
    assert completion_s(behind_prefill(lesson)) <= SLOWER * completion_s(behind_prefill(Lesson.NOTHING))


@rare
@WRONG
def test_documents_whose_pages_are_compressed_end_as_early(lesson: Lesson) -> None:
    assert completion_s(compressed(lesson)) <= SLOWER * completion_s(compressed(Lesson.NOTHING))


@rare  # each run sees that a prediction moves no plan (scheduling/test_lengths.py)
@OF_RIGHT_AND_WRONG
def test_as_many_chats_attain_where_memory_is_short(lesson: Lesson) -> None:
    """Learnt predictions refused a fifth of such chats while memory was free, twice as many as without predictions.

    Where outputs were longer than predicted, nobody was refused while chats that had begun waited for most of the
    memory: as many attained, but only the short ones. So the tokens of those that attain count too.
    """
    wrong, none = ([each for each in chats(which) if attains(each)] for which in (lesson, Lesson.NOTHING))
    assert len(wrong) >= len(none) - FEWER_CHATS * len(chats(lesson))
    assert tokens(wrong) >= FEWER_TOKENS * tokens(none)


@rare  # each run sees that a prediction moves no plan (scheduling/test_lengths.py)
@OF_RIGHT_AND_WRONG
def test_as_many_documents_end_within_their_windows(lesson: Lesson) -> None:
    """Plans by predicted lengths made long documents urgent first, and all others waited for them."""
    assert kept(windows(lesson)) >= kept(windows(Lesson.NOTHING)) - MORE_LATE / 3


@rare
@pytest.mark.parametrize("lesson", [Lesson.LEARNT, Lesson.PERFECT])
def test_right_predictions_let_documents_end_earlier(lesson: Lesson) -> None:
    right, none = documents(lesson, FEW_TOKENS, 200), documents(Lesson.NOTHING, FEW_TOKENS, 200)
    assert completion_s(right) <= 0.92 * completion_s(none)
