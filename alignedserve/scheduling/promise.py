"""The promise that a request gets, by its class; where all requests have levels, one that ALISE §3.1 ranks."""

from __future__ import annotations

from alignedserve.core import Due, Request, ServiceClass
from alignedserve.scheduling.dues import Promise, StepPromise, TokenPromise
from alignedserve.scheduling.lengths import expected, num_outlived, outlived
from alignedserve.scheduling.levels import STEP_PROMPT, Level
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Standing, StepTimes, Work


class _Levelled(Promise):
    """A promise by the steps that its request is predicted to take; each doubling of the prediction is a level.

    A request ages from its arrival on, served or not: it does not leave a level again after its first step there. Each
    part reckons the level from the arrival, so that no message carries it.
    """

    __slots__ = ()
    _aged: Level
    _predicted: int
    _num_output: int

    def _begin(self, request: Request, policy: Policy) -> None:
        self._aged, self._predicted = Level(request.arrival_at, policy.age_s), expected(request, policy).mean

    def expect(self, request: Request, policy: Policy, now: float) -> None:
        # pyrefly: ignore[abstract-method-call]
        super().expect(request, policy, now)  # that of the class beside this one
        self._predicted = expected(request, policy).mean

    def changes_at(self, now: float) -> float:
        return self._aged.rises_at(now)

    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        standing = super().standing(now, work, times)  # pyrefly: ignore[abstract-method-call]
        predicted, num_output = self._predicted, self._num_output
        left = outlived(predicted, self.request.max_tokens, num_output) - num_output
        standing.remaining = steps = work.prompt // STEP_PROMPT + max(1, left)
        self._aged.num_outlived = num_outlived(predicted, num_output)
        standing.level = self._aged.at(now, steps)
        return standing


class LevelledTokens(_Levelled, TokenPromise):
    __slots__ = ("_aged", "_predicted")

    def __init__(self, request: Request, policy: Policy, num_output: int, due: Due | None) -> None:
        super().__init__(request, policy, num_output, due)
        self._begin(request, policy)


class LevelledSteps(_Levelled, StepPromise):
    def __init__(self, request: Request, policy: Policy, num_output: int) -> None:
        super().__init__(request, policy, num_output)
        self._begin(request, policy)


def promise(request: Request, policy: Policy, num_output: int = 0, due: Due | None = None) -> Promise:
    """Return the promise of a request with `num_output` tokens; `due` is the state that another part left."""
    has_levels = policy.ordering.has_levels
    if request.service is ServiceClass.RT:
        return (LevelledTokens if has_levels else TokenPromise)(request, policy, num_output, due)
    return (LevelledSteps if has_levels else StepPromise)(request, policy, num_output)
