"""Guards between cores and custom policies: a core asks a guard, and decides itself where that has no answer.

    raises, or returns nonsense   the default makes this one decision; the next is the policy's again
    is slow                       for some answers that is borne; then the default decides, until the part starts again
    does not answer at all        it is ended (shell/answer_limit.py); the default decides, until the part starts again

Every failure is counted; the first is logged, and then each that makes ten times as many.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from alignedserve.policies.kinds import OwnPolicy, PolicyKind

if TYPE_CHECKING:
    from alignedserve.policies.source import PolicySource

log = logging.getLogger("alignedserve.policy")

MOST_WASTED_S = 1.0  # that slow answers may take beyond what is usual, less what quick ones leave of it


class PolicyFailure(str, Enum):
    RAISED = "raised"
    NONSENSE = "nonsense"
    SLOW = "slow"


class PolicyOverdue(BaseException):
    """Raised within a policy that does not answer; no exception of the policy's own, which it might catch."""


class Limit:
    """Ends a policy that does not answer (shell/answer_limit.py): a question is asked while the limit is entered.

    As it stands it lets every policy finish: in a simulation the end of one would depend on the machine."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """End nothing from now on, even where leaving was cut short."""


_NO_LIMIT = Limit()


class Failures:
    """How often policies have failed, by their kind and by how they failed, and why they did so first."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[PolicyKind, PolicyFailure]] = Counter()
        self.first: dict[tuple[PolicyKind, PolicyFailure], str] = {}

    def add(self, kind: PolicyKind, how: PolicyFailure, why: str) -> int:
        """Return how many there are of this kind now."""
        self.first.setdefault((kind, how), why)
        self.counts[kind, how] += 1
        return self.counts[kind, how]

    def lines(self) -> list[str]:
        """Return a line for each way in which a policy failed."""
        return [
            f"{kind.label}: {how.value}, {number} times, first: {self.first[kind, how]}"
            for (kind, how), number in sorted(self.counts.items())
        ]


class Guard:
    """Asks one policy. `stopwatch` returns seconds: a core has no clock of its own."""

    def __init__(
        self, name: str, policy: OwnPolicy, stopwatch: Callable[[], float], failures: Failures, limit: Limit = _NO_LIMIT
    ) -> None:
        self.name, self.policy = name, policy
        self._ask, self._problem = getattr(policy, policy.method), policy.problem
        self._stopwatch, self._failures, self._limit = stopwatch, failures, limit
        self._wasted_s = 0.0
        self._is_given_up = False

    def ask(self, *facts: Any, usual: Any = None) -> Any:
        """Return the policy's answer, or `usual` where the default decides."""
        return self.call(self._ask, self._problem, *facts, usual=usual)

    def call(
        self, method: Callable[..., Any], problem_of: Callable[..., str | None], *facts: Any, usual: Any = None
    ) -> Any:
        """Return what a method of the policy answers. `problem_of` returns why that is no answer, or None."""
        if self._is_given_up:
            return usual
        began = self._stopwatch()
        try:
            with self._limit:
                answer = method(*facts)
                problem = problem_of(answer, *facts)
        except PolicyOverdue:
            self._limit.close()
            self._give_up("it did not answer, and was ended")
            return usual
        except (Exception, SystemExit) as error:
            answer, problem = usual, None
            self.fail(PolicyFailure.RAISED, told(error, self.name))
        usual_s = self.policy.usual_s
        self._wasted_s = max(0.0, self._wasted_s + self._stopwatch() - began - usual_s)
        if self._wasted_s > MOST_WASTED_S:
            self._give_up(f"more than {1000 * usual_s:g} ms too often")
        if problem is None:
            return answer
        self.fail(PolicyFailure.NONSENSE, problem)
        return usual

    def _give_up(self, why: str) -> None:
        self._is_given_up = True
        self.fail(PolicyFailure.SLOW, f"{why}; it is asked no more")

    def fail(self, how: PolicyFailure, why: str) -> None:
        """Count a failure, and log the first and then each that makes ten times as many."""
        kind = self.policy.kind
        number = self._failures.add(kind, how, why)
        if number == 10 ** (len(str(number)) - 1):
            what = self.name, kind.label, how.value, why, number
            log.error("the policy %s for %s: %s: %s (%d so far); the default decides", *what)


@dataclass(frozen=True)
class OwnPolicies:
    """The custom policies of one source, as one part asks them; without a source there are none.

    Without a stopwatch no policy is slow: so a simulation does not depend on the machine that it runs on."""

    source: PolicySource | None = None
    failures: Failures = field(default_factory=Failures, compare=False)
    stopwatch: Callable[[], float] = field(default=lambda: 0.0, compare=False)
    limit: Limit = field(default=_NO_LIMIT, compare=False)

    def decides(self, kind: PolicyKind) -> bool:
        return self.source is not None and self.source.decides(kind)

    def guard(self, kind: PolicyKind, *given: Any) -> Guard | None:
        """Make the policy for a decision, a scheduler with what is given, and return the guard that asks it; None where
        there is none."""
        if self.source is None or not self.decides(kind):
            return None
        return Guard(self.source.name, self.source.make(kind, *given), self.stopwatch, self.failures, self.limit)


def told(error: BaseException, file: str) -> str:
    """Return the error as a line, with the line of the policy's file at which it was raised, or where that is not
    known the last place behind the call of the policy."""
    if isinstance(error, SyntaxError):
        text, where = error.msg, f", line {error.lineno}"
    else:
        text, where = str(error), _where(error, file)
    return " ".join(f"{type(error).__name__}: {text:.200}{where}".split())


def _where(error: BaseException, file: str) -> str:
    frames = extract_tb(error.__traceback__)[1:]  # the first is the caller's
    for frame in reversed(frames):
        if frame.filename == file:
            return f", line {frame.lineno}"
    return f", line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""


NO_POLICIES = OwnPolicies()
