"""The orders in which only these schedulers serve requests."""

from __future__ import annotations

from alignedserve.scheduling.levels import TOP
from alignedserve.scheduling.orders import ByKey, Ordering
from alignedserve.scheduling.slo import Standing, StepTimes


class ByAccelGen(Ordering):
    """AccelGen's order: by slack, reckoned with T_max, the longest time of a step (§4.3).

    Documents go by slack too. Their slack is spread over their steps, so the longest documents have the least; our
    orders put the document with the fewest predicted steps first (ALISE §3.1).
    """

    def times_of(self, times: StepTimes) -> StepTimes:
        return StepTimes(times.most_s, times.most_s)

    def document_key(self, standing: Standing) -> tuple[float, ...]:
        return (standing.at + standing.slack_s,)


class ByRemaining(ByKey):
    """Order by tokens still to run: of the prompt, and of the output as predicted. The fewest go first."""

    def key(self, standing: Standing) -> tuple[float, ...]:
        return (standing.remaining,)


class ByLevels(ByKey):
    """By level, within a level the shortest first; by arrival above the levels, so that no request waits for ever."""

    def key(self, standing: Standing) -> tuple[float, ...]:
        return standing.level, standing.remaining if standing.level > TOP else 0.0


BY_ACCELGEN = ByAccelGen(goes_by_promises=True)
BY_REMAINING, BY_LEVELS = ByRemaining(), ByLevels(has_levels=True)
