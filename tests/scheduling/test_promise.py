"""Promises: the same due times wherever the request is, a plan that only another expectation respaces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import ServiceClass, Slo
from alignedserve.papers.names import SchedulerName
from alignedserve.scheduling.dues import Promise, promise
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import StepTimes, Work, in_order
from tests.samples import request

TIMES = StepTimes(mean_s=0.01, most_s=0.02)
CHAT = replace(request(prompt=100), slo=Slo(ttft_s=1.0, tbt_s=0.2), arrival_at=10.0)
DOCUMENT = replace(
    request(prompt=1000, max_tokens=1000), service=ServiceClass.BE, slo=Slo(jct_s=101.0), arrival_at=10.0
)
POLICY = Policy(expected_output=100, expected_chunk=500)  # a document of two chunks: 1 + 100 steps


def slack_s(of: Promise, now: float, work: Work = Work()) -> float:  # noqa: B008  (frozen)
    return of.standing(now, work, TIMES).slack_s


def test_a_chat_goes_on_elsewhere_where_it_was() -> None:
    here = promise(CHAT, POLICY)
    here.emitted(10.5, 1)
    there = promise(CHAT, POLICY, num_output=1, due=here.due)
    assert slack_s(here, 10.6) == slack_s(there, 10.6) == pytest.approx(0.1 - TIMES.mean_s)


@pytest.mark.parametrize(("scheduler", "num_chunks"), [(SchedulerName.BROS, 4), (SchedulerName.ALIGNED, 1)])
def test_the_slack_of_a_prompt_counts_its_chunks_in_the_order_by_slack(
    scheduler: SchedulerName, num_chunks: int
) -> None:
    found_s = slack_s(promise(CHAT, Policy(scheduler)), 10.0, Work(prompt=100, chunk=30))
    assert found_s == pytest.approx(1.0 - num_chunks * TIMES.most_s)


def test_a_document_has_a_due_for_every_step() -> None:
    kept = promise(DOCUMENT, POLICY)
    assert slack_s(kept, 10.0) == pytest.approx(1.0 - TIMES.most_s)
    kept.chunk_ran()
    assert slack_s(kept, 10.0) == pytest.approx(2.0 - TIMES.most_s)
    kept.emitted(11.5, 1)
    assert slack_s(kept, 11.5) == pytest.approx(1.5 - TIMES.most_s)


def test_chunks_of_another_size_than_planned_shift_no_due_of_a_token() -> None:
    kept = promise(DOCUMENT, POLICY)
    for _ in range(7):
        kept.chunk_ran()
    kept.emitted(20.0, 1)
    assert slack_s(kept, 20.0) == slack_s(promise(DOCUMENT, POLICY, num_output=1), 20.0)


def test_a_request_that_outlives_the_expectation_gets_closer_dues() -> None:
    """Half of the window is left at 60 s for what is now expected: 100 more tokens."""
    kept = promise(DOCUMENT, POLICY)
    for number in range(1, 101):
        kept.emitted(60.5, number)
    assert slack_s(kept, 60.5) == pytest.approx(50.5 / 100 - TIMES.most_s)


def test_a_request_that_ends_before_is_not_expected_to_go_on() -> None:
    short = promise(replace(DOCUMENT, max_tokens=10), POLICY)
    assert slack_s(short, 10.0) == pytest.approx(101.0 / 11 - TIMES.most_s)


def test_only_chats_take_their_due_along() -> None:
    assert promise(DOCUMENT, POLICY).due is None
    assert promise(CHAT, POLICY).due is not None


def test_of_documents_of_a_level_the_sooner_restored_goes_first() -> None:
    """The request that is restored sooner has a little more output left (algorithms §1): 250 tokens against 200."""
    long, short = (
        promise(replace(DOCUMENT, id=name, slo=Slo(jct_s=1e5)), replace(POLICY, expected_output=tokens))
        for name, tokens in (("long", 250), ("short", 200))
    )
    away = long.standing(10.0, Work(transfer_s=0.1), TIMES), short.standing(10.0, Work(transfer_s=0.2), TIMES)
    here = long.standing(10.0, Work(), TIMES), short.standing(10.0, Work(), TIMES)
    assert [standing.id for standing in in_order(away, TIMES)] == ["long", "short"]
    assert [standing.id for standing in in_order(here, TIMES)] == ["short", "long"]


def test_a_document_that_lost_its_memory_goes_before_documents_that_have_not_begun() -> None:
    short = replace(DOCUMENT, id="short", prompt=(1,) * 10, max_tokens=5, arrival_at=9.0)
    again = promise(DOCUMENT, POLICY, num_output=50).standing(10.0, Work(prompt=1050, chunk=500), TIMES)
    fresh = promise(short, POLICY).standing(10.0, Work(prompt=10, chunk=500), TIMES)
    assert [standing.id for standing in in_order([fresh, again], TIMES)] == [DOCUMENT.id, "short"]
