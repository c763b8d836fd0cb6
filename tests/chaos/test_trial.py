"""Tests of how a trial judges answers, with answers that no deployment gave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.comparing import Undisturbed
from tests.chaos.load import Answer, Error
from tests.chaos.parts import Parts
from tests.chaos.trial import BLAMING_DEATHS, MOST_REFUSED_S, Row, _Trial, longest_refusal, num_ended_as_hung
from tests.end_to_end.client import Wanted

TOKENS = [5, 6, 7]


@pytest.fixture
def parts() -> Parts:
    return Parts(dict)


@pytest.fixture
def trial(parts: Parts) -> _Trial:
    stage: Any = SimpleNamespace(deployment=None, parts=parts, faults=[])
    judged = _Trial(stage, Row("1+1", "1+1", "processes", 0), 0)
    judged._questions = [Wanted((1, 2), len(TOKENS), stream=True)]
    judged._undisturbed = [Undisturbed(TOKENS, "abc")]
    return judged


def answer(**more: Any) -> Answer:
    given: dict[str, Any] = {"number": 0, "began_at": 0.0, "ended_at": 1.0, **more}
    return Answer(**given)


def test_an_answer_without_tokens_and_without_an_error_is_lost(trial: _Trial) -> None:
    trial._judge(answer())
    assert (trial._row.lost, len(trial._row.problems)) == (len(TOKENS), 1)


def test_an_answer_that_is_whole_is_no_problem(trial: _Trial) -> None:
    trial._judge(answer(tokens=TOKENS, text="abc"))
    assert (trial._row.streams, trial._row.problems) == (1, [])


def test_a_refusal_is_counted_under_faults_and_a_problem_when_nothing_is_hurt(trial: _Trial) -> None:
    trial._judge(answer(error=Error.REFUSED))
    assert (trial._row.refused, trial._row.problems) == (1, [])
    trial._judge(answer(error=Error.REFUSED, said="503"), is_calm=True)
    assert (trial._row.failed, trial._row.problems) == (1, ["question 0: 503"])


def test_a_request_is_blamed_only_where_its_workers_were_hurt_as_often(trial: _Trial, parts: Parts) -> None:
    trial._judge(answer(error=Error.BLAMED, said="500", ended_at=1e18))
    assert (trial._row.blamed, len(trial._row.problems)) == (0, 1)
    for _ in range(BLAMING_DEATHS):
        parts.note("decode-0")
    trial._judge(answer(error=Error.BLAMED, said="500", ended_at=1e18))
    assert (trial._row.blamed, len(trial._row.problems)) == (1, 1)


def test_refusals_are_measured_from_tokens_to_tokens() -> None:
    refused = [answer(error=Error.REFUSED, ended_at=at) for at in (10.0, 12.0, 20.0, 30.0 + MOST_REFUSED_S)]
    assert longest_refusal(refused) == 20.0 + MOST_REFUSED_S
    assert longest_refusal([*refused, answer(tokens=[1], ended_at=21.0)]) == 10.0
    assert longest_refusal([answer(tokens=[1])]) == 0.0


def test_a_life_that_process_and_launcher_find_hung_is_counted_once() -> None:
    said = "2026-11-27 10:58:34,484 ERROR decode-0: the turn loop has stood still: this process ends, and starts again"
    found = "alignedserve: decode-0 runs and has given no sign of life for 8 s: it is ended, and starts again"
    ended, other = "alignedserve: decode-0 ended with 1", "alignedserve: pool-0 was ended by SIGPROF"
    assert num_ended_as_hung("\n".join([said, found, ended])) == 1
    killed = "alignedserve: pool-0 was ended by SIGKILL"
    assert num_ended_as_hung("\n".join([said, ended, found, ended, other, killed])) == 3
