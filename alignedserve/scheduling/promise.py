"""The promise to a request, as its worker or pool uses it: its dues, its place in the order, its bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import ceil, inf
from typing import ClassVar

from alignedserve.core import Due, Request, ServiceClass
from alignedserve.scheduling.lengths import expected, num_outlived, outlived, planned
from alignedserve.scheduling.levels import INTERRUPTED, STEP_PROMPT, AgedLevel, Level
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import (
    Standing,
    StepDues,
    StepTimes,
    TokenDues,
    Work,
    step_slack_s,
    token_slack_s,
)

BEHIND = 1 << 80  # more than the priorities of requests differ by


class Promise(ABC):
    """The promise of one request. The part that has the request tells it what has happened."""

    __slots__ = ("request",)
    # Plain attributes, because the step selection reads them of many requests at every step:
    dues: TokenDues | None = None  # set for a real-time request
    is_rt: ClassVar[bool] = False

    def __init__(self, request: Request) -> None:
        self.request = request

    @abstractmethod
    def is_late(self, now: float) -> bool: ...

    @abstractmethod
    def due_at(self, now: float) -> float:
        """Return when the next token is due."""

    @abstractmethod
    def late_at(self, now: float) -> float:
        """Return when the request will have missed its promise, if it emits nothing until then."""

    @property
    @abstractmethod
    def due(self) -> Due | None:
        """Return the state that goes with the request to another part."""

    @abstractmethod
    def emitted(self, now: float, num_output: int) -> None:
        """Count a token, the `num_output`-th of the output."""

    @abstractmethod
    def expect(self, request: Request, policy: Policy, now: float) -> None:
        """Take over the same request with a new estimate."""

    def served(self, now: float) -> None:  # noqa: B027  (most promises have no levels)
        """Note that a step with this request has ended."""

    def changes_at(self, now: float) -> float:
        """Return when the request's place among others changes by itself."""
        return self.late_at(now)

    def chunk_ran(self) -> None:  # noqa: B027  (most promises do not count steps)
        """Count a chunk of the prompt that was not the last one."""

    @abstractmethod
    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        """Return all that the request's place in the order depends on."""


class TokenPromise(Promise):
    """The promise of a real-time request: every token has a due."""

    __slots__ = ("_counts_chunks", "_expected", "_num_output", "dues", "is_behind")
    dues: TokenDues
    is_rt = True
    is_behind: bool  # whether it comes behind all other real-time requests: its prompt is beyond its caller's part

    def __init__(self, request: Request, policy: Policy, num_output: int, due: Due | None) -> None:
        super().__init__(request)
        self._expected, self._num_output = expected(request, policy).mean, num_output
        self._counts_chunks = policy.ordering.counts_chunks
        self.dues = TokenDues(request, policy.late, due)
        self.is_behind = False

    @property
    def due(self) -> Due:
        return self.dues.due

    def due_at(self, now: float) -> float:
        return self.dues.due_at(now)

    def late_at(self, now: float) -> float:
        return self.dues.due_at(now)

    def is_late(self, now: float) -> bool:
        return self.dues.is_late(now)

    def emitted(self, now: float, num_output: int) -> None:
        self._num_output = num_output
        self.dues.emitted(now)

    def expect(self, request: Request, policy: Policy, now: float) -> None:
        self.request, self._expected = request, expected(request, policy).mean

    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        slack_s = token_slack_s(self.dues.due_at(now), now, work, times, self._counts_chunks)
        request, behind = self.request, 0
        if self.is_behind:
            slack_s, behind = inf, BEHIND
        is_late = self.dues.is_late(now)
        whole = outlived(self._expected, request.max_tokens, self._num_output)
        remaining = work.prompt + max(1, whole - self._num_output)
        return Standing(
            request.id,
            request.service,
            slack_s,
            request.arrival_at,
            is_late,
            request.priority + behind,
            0,
            0.0,
            remaining,
            work.prompt > 0,
            now,
        )


class Yielding(Promise):
    """The promise of a real-time request that is beyond its caller's part of the seats (caller_shares.py).

    Until it is within that part, it is served as best-effort requests are. Its dues pass meanwhile."""

    __slots__ = ("kept",)

    def __init__(self, kept: Promise) -> None:
        super().__init__(kept.request)
        self.kept = kept

    @property
    def due(self) -> Due | None:
        return self.kept.due

    def due_at(self, now: float) -> float:
        return self.kept.due_at(now)

    def late_at(self, now: float) -> float:
        return inf

    def is_late(self, now: float) -> bool:
        return False

    def emitted(self, now: float, num_output: int) -> None:
        self.kept.emitted(now, num_output)

    def expect(self, request: Request, policy: Policy, now: float) -> None:
        self.kept.expect(request, policy, now)
        self.request = request

    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        standing = self.kept.standing(now, work, times)
        standing.service, standing.slack_s, standing.is_late = ServiceClass.BE, inf, False
        return standing


class StepPromise(Promise):
    """The promise of a best-effort request: a plan of steps over its completion window.

    The plan has as many tokens as the prior says: by its predicted length a long request would be urgent from the
    start, and all others would wait for it.
    """

    def __init__(self, request: Request, policy: Policy, num_output: int) -> None:
        super().__init__(request)
        self._expected = outlived(expected(request, policy).mean, request.max_tokens, num_output)
        self._planned = outlived(planned(request, policy), request.max_tokens, num_output)
        self._num_output = num_output
        self._early_chunks = ceil(len(request.prompt) / policy.expected_chunk) - 1  # the last chunk samples a token
        self._dues = StepDues(request, self._early_chunks + self._planned)
        if num_output:
            self._dues.num_done = self._early_chunks + num_output
        self._level = Level(request.arrival_at, policy.age_s)

    @property
    def due(self) -> None:
        return None

    def due_at(self, now: float) -> float:
        return self._dues.due_at()

    def emitted(self, now: float, num_output: int) -> None:
        self._dues.num_done, self._num_output = self._early_chunks + num_output, num_output
        self._level.served(now)
        most = self.request.max_tokens
        if (whole := outlived(self._expected, most, num_output)) != self._expected:
            self._expected = whole
            self._level.outlived()
        if (whole := outlived(self._planned, most, num_output)) != self._planned:
            self._planned = whole
            self._dues.replan(now, self._early_chunks + whole - self._dues.num_done)

    def expect(self, request: Request, policy: Policy, now: float) -> None:
        self.request = request
        self._expected = outlived(expected(request, policy).mean, request.max_tokens, self._num_output)

    def served(self, now: float) -> None:
        self._level.served(now)

    def changes_at(self, now: float) -> float:
        rises_at = self._level.rises_at(now)
        return rises_at if self._dues.is_late(now) else min(self._dues.end_at, rises_at)

    def chunk_ran(self) -> None:
        if self._dues.num_done < self._early_chunks:  # recomputed chunks were counted before
            self._dues.done()

    def late_at(self, now: float) -> float:
        return self._dues.end_at

    def is_late(self, now: float) -> bool:
        return self._dues.is_late(now)

    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        request = self.request
        slack_s = step_slack_s(self._dues.due_at(), now, times)
        remaining = work.prompt + max(1, self._early_chunks + self._expected - self._dues.num_done)
        is_late = self._dues.is_late(now)
        has_begun = self._num_output > 0
        is_interrupted = has_begun and work.prompt > 0
        return Standing(
            request.id,
            request.service,
            slack_s,
            request.arrival_at,
            is_late,
            request.priority,
            INTERRUPTED if is_interrupted else self._level.at(now, remaining, has_begun),
            work.transfer_s,
            remaining,
            work.prompt > 0,
            now,
        )


class PredictedLevel:
    """The place of a request by the steps that it is predicted to take, where all requests have levels (ALISE §3.1)."""

    __slots__ = ("_level", "_most", "_predicted")

    def __init__(self, request: Request, policy: Policy) -> None:
        self._level, self._most = AgedLevel(request.arrival_at, policy.age_s), request.max_tokens
        self.expect(request, policy)

    def expect(self, request: Request, policy: Policy) -> None:
        self._predicted = expected(request, policy).mean

    def rises_at(self, now: float) -> float:
        return self._level.rises_at(now)

    def place(self, standing: Standing, num_output: int, prompt: int, now: float) -> Standing:
        """Return the standing with the level; each doubling of a prediction is a level."""
        whole = outlived(self._predicted, self._most, num_output)
        standing.remaining = steps = prompt // STEP_PROMPT + max(1, whole - num_output)
        standing.level = self._level.risen(now, steps, num_outlived(self._predicted, num_output))
        return standing


class _Levelled(Promise):
    """A promise of either class, where all requests have levels."""

    __slots__ = ()
    _place: PredictedLevel
    _num_output: int

    def expect(self, request: Request, policy: Policy, now: float) -> None:
        # pyrefly: ignore[abstract-method-call]
        super().expect(request, policy, now)  # that of the class beside this one
        self._place.expect(request, policy)

    def changes_at(self, now: float) -> float:
        return self._place.rises_at(now)

    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        standing = super().standing(now, work, times)  # pyrefly: ignore[abstract-method-call]
        return self._place.place(standing, self._num_output, work.prompt, now)


class LevelledTokens(_Levelled, TokenPromise):
    __slots__ = ("_place",)

    def __init__(self, request: Request, policy: Policy, num_output: int, due: Due | None) -> None:
        super().__init__(request, policy, num_output, due)
        self._place = PredictedLevel(request, policy)


class LevelledSteps(_Levelled, StepPromise):
    __slots__ = ("_place",)

    def __init__(self, request: Request, policy: Policy, num_output: int) -> None:
        super().__init__(request, policy, num_output)
        self._place = PredictedLevel(request, policy)


def tokens_left(request: Request, policy: Policy, num_output: int) -> int:
    """Return how many more tokens a request with `num_output` tokens is expected to produce."""
    return outlived(expected(request, policy).mean, request.max_tokens, num_output) - num_output


def promise(request: Request, policy: Policy, num_output: int = 0, due: Due | None = None) -> Promise:
    """Return the promise of a request with `num_output` tokens; `due` is the state that another part left."""
    has_levels = policy.ordering.has_levels
    if request.service is ServiceClass.RT:
        return (LevelledTokens if has_levels else TokenPromise)(request, policy, num_output, due)
    return (LevelledSteps if has_levels else StepPromise)(request, policy, num_output)
