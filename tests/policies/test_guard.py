"""What guards cores from custom policies: each failure is named, and the default decides."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from traceback import extract_tb
from typing import Any, NoReturn

import pytest

from alignedserve.policies.guard import MOST_WASTED_S, Failures, Guard, PolicyFailure, PolicyOverdue, told
from alignedserve.policies.kinds import (
    AdmissionPolicy,
    NewRequest,
    OrderPolicy,
    OwnPolicy,
    PlacementPolicy,
    PolicyKind,
    PredictorPolicy,
    RequestInLine,
    WorkerChoice,
)
from alignedserve.schedulers.scheduler import Scheduler
from alignedserve.shell import answer_limit
from alignedserve.shell.answer_limit import AnswerLimit

USUAL = object()  # the answer where the default decides
IN_LINE = RequestInLine("a", True, 0, 1.0, 2.0, 3.0, True, False)
NEW = NewRequest("a", True, 0, 1.0, (1, 2), 8, 4, 1.0, 0.2, 60.0)
WORKERS = [WorkerChoice(name, 0.0, 0.1, 0, 0, 0) for name in ("decode-0", "decode-1")]


def guard_of(policy: OwnPolicy, seconds: Iterator[float] | None = None) -> tuple[Guard, Failures]:
    failures, times = Failures(), seconds or iter(lambda: 0.0, None)
    return Guard("mine.py", policy, lambda: next(times), failures), failures


def answering(kind: Any, answer: Any) -> OwnPolicy:
    """Return a policy of this kind that gives, or raises, always the same."""

    def given(*_facts: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    made: OwnPolicy = type("Made", (kind,), {kind.method: given})(*kind.made_with)
    setattr(made, kind.method, given)
    return made


GOOD = [
    (OrderPolicy, (IN_LINE,), 3),
    (OrderPolicy, (IN_LINE,), -0.5),
    (PlacementPolicy, (NEW, WORKERS), "decode-1"),
    (AdmissionPolicy, (NEW, None), None),
    (AdmissionPolicy, (NEW, None), 2.5),
    (PredictorPolicy, (NEW,), 17.5),
]
NONSENSE = [
    (OrderPolicy, (IN_LINE,), "first", "'first' is no finite number"),
    (OrderPolicy, (IN_LINE,), float("nan"), "nan is no finite number"),
    (OrderPolicy, (IN_LINE,), None, "None is no finite number"),
    (PlacementPolicy, (NEW, WORKERS), "decode-2", "'decode-2' is the name of no worker that was offered"),
    (AdmissionPolicy, (NEW, None), -1, "-1 seconds have passed already"),
    (AdmissionPolicy, (NEW, None), float("inf"), "inf is no finite number"),
    (PredictorPolicy, (NEW,), 0, "0 tokens are no output"),
]


@pytest.mark.parametrize(("kind", "facts", "answer"), GOOD)
def test_an_answer_is_passed_on(kind: type[OwnPolicy], facts: tuple[Any, ...], answer: Any) -> None:
    guard, failures = guard_of(answering(kind, answer))
    assert guard.ask(*facts) == answer
    assert failures.lines() == []


@pytest.mark.parametrize(("kind", "facts", "answer", "why"), NONSENSE)
def test_nonsense_is_named(
    kind: type[OwnPolicy], facts: tuple[Any, ...], answer: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    guard, failures = guard_of(answering(kind, answer))
    assert guard.ask(*facts, usual=USUAL) is USUAL
    assert failures.lines() == [f"{kind.kind.value}: nonsense, 1 times, first: {why}"]
    caplog.clear()
    guard.ask(*facts)
    assert caplog.messages == []  # it was said already


def test_what_raises_is_named_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    guard, failures = guard_of(answering(OrderPolicy, ZeroDivisionError("division by zero")))
    with caplog.at_level(logging.ERROR, "alignedserve.policy"):
        answers = [guard.ask(IN_LINE, usual=USUAL) for _ in range(120)]
    assert answers == [USUAL] * 120
    assert failures.counts == {(PolicyKind.ORDER, PolicyFailure.RAISED): 120}
    assert [message.partition("(")[2] for message in caplog.messages] == [
        f"{number} so far); the default decides" for number in (1, 10, 100)
    ]
    assert caplog.messages[0].startswith("the policy mine.py for order: raised: ZeroDivisionError: division by zero,")


def test_a_policy_that_ends_the_process_is_only_one_that_raises() -> None:
    guard, failures = guard_of(answering(OrderPolicy, SystemExit(1)))
    assert guard.ask(IN_LINE, usual=USUAL) is USUAL
    assert failures.counts == {(PolicyKind.ORDER, PolicyFailure.RAISED): 1}


def test_a_slow_policy_is_asked_no_more() -> None:
    seconds = (0.2 * tick for tick in count())
    guard, failures = guard_of(answering(PlacementPolicy, "decode-1"), seconds)
    answers = [guard.ask(NEW, WORKERS, usual=USUAL) for _ in range(10)]
    borne = int(MOST_WASTED_S / 0.2) + 1
    assert answers == ["decode-1"] * borne + [USUAL] * (10 - borne)
    assert failures.counts == {(PolicyKind.PLACEMENT, PolicyFailure.SLOW): 1}


@pytest.mark.parametrize(("kind", "usual_ms"), [(Scheduler, 5), (PlacementPolicy, 1), (OrderPolicy, 0.1)])
def test_a_policy_may_take_as_long_as_is_usual_of_its_kind(kind: type[OwnPolicy], usual_ms: float) -> None:
    """Who writes a policy keeps to these times; docs/how/scheduler.md has the scheduler's."""
    for share in (0.9, 1.5):
        guard, failures = guard_of(answering(kind, None), (share * 1e-3 * usual_ms * tick for tick in count()))
        for _ in range(int(1.1 * MOST_WASTED_S / (0.5e-3 * usual_ms))):
            guard.call(lambda: None, lambda _answer: None)
        assert failures.counts == ({(kind.kind, PolicyFailure.SLOW): 1} if share > 1 else {})


def test_one_slow_answer_among_quick_ones_is_borne() -> None:
    def times() -> Iterator[float]:
        now = 0.0
        for number in count():
            yield now
            now += 0.9 if number % 20_000 == 0 else 1e-5
            yield now

    guard, failures = guard_of(answering(OrderPolicy, 1.0), times())
    assert {guard.ask(IN_LINE) for _ in range(50_000)} == {1.0}
    assert failures.lines() == []


class Endless(OrderPolicy):
    turns = 0

    def key(self, request: RequestInLine) -> NoReturn:
        while True:
            with suppress(Exception):  # not what ends it
                self.turns += 1


def test_a_policy_that_does_not_answer_is_ended_and_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts what the endless policy does: however long a busy machine takes, the other is never late."""
    endless = Endless()
    monkeypatch.setattr(answer_limit, "monotonic", lambda: float(endless.turns))
    failures, limit = Failures(), AnswerLimit(most_s=0.02)
    guard = Guard("mine.py", endless, lambda: 0.0, failures, limit)
    assert guard.ask(IN_LINE, usual=USUAL) is USUAL
    assert guard.ask(IN_LINE, usual=USUAL) is USUAL
    assert failures.lines() == ["order: slow, 1 times, first: it did not answer, and was ended; it is asked no more"]
    other = Guard("mine.py", answering(PlacementPolicy, "decode-1"), lambda: 0.0, failures, limit)
    assert {other.ask(NEW, WORKERS) for _ in range(50_000)} == {"decode-1"}


class Busy(OrderPolicy):
    """Calls ours again and again, which a scheduler's tools stand for."""

    def __init__(self) -> None:
        self.turns, self.ended_in = 0, ""

    def key(self, request: RequestInLine) -> NoReturn:
        try:
            while True:
                self.turns += 1
                for number in range(50):
                    told(ValueError(number), "nowhere")
        except PolicyOverdue as error:
            self.ended_in = extract_tb(error.__traceback__)[-1].filename
            raise


def test_a_policy_is_ended_in_its_own_lines_and_not_in_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy()
    monkeypatch.setattr(answer_limit, "monotonic", lambda: float(busy.turns))
    guard = Guard("mine.py", busy, lambda: 0.0, Failures(), AnswerLimit(most_s=0.02))
    assert guard.ask(IN_LINE, usual=USUAL) is USUAL
    assert busy.ended_in == __file__


_PROFILED = """
import sys
from alignedserve.policies.guard import PolicyOverdue
from alignedserve.shell import answer_limit

turns = 0
answer_limit.monotonic = lambda: turns
limit = answer_limit.AnswerLimit(most_s=0.02)
for _ in range(3):
    with limit:
        pass
    try:
        with limit:
            while True:
                turns += 1
    except PolicyOverdue:
        pass
sys.setprofile(lambda *_: None)
print((lambda: "called")())
"""


def test_a_profiler_still_counts_calls_after_questions() -> None:
    """Python 3.11 hung at the next call that was profiled: an exception that had been taken back was looked for."""
    done = subprocess.run([sys.executable, "-c", _PROFILED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "called\n", done.stderr
