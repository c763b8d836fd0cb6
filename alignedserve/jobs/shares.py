"""Who gets how much, of several jobs: first what each needs to be through in time, then by weight.

    needs   tokens left / seconds left / tokens per second of the system: the share that would just do
    shares  nearest deadline first, each gets what it needs; what is then left is divided by weight

Where all needs together are more than there is, those with the latest deadlines get less than they need, or nothing:
one job that cannot be kept is no reason to miss two. They run where the others leave places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_LEFT_S = 1.0  # where there is none


@dataclass(frozen=True)
class Demand:
    """Of a job that has lines left."""

    job: str
    deadline: float
    aim: float  # before the deadline: speeds and lengths are not what they were, and the last lines take their time
    weight: float
    tokens_left: float


def shares(demands: Sequence[Demand], tokens_per_s: float | None, now: float) -> dict[str, float]:
    """They sum up to 1. While nobody knows how fast the system is, by weight alone."""
    left = 1.0
    given: dict[str, float] = {}
    for demand in sorted(demands, key=lambda one: (one.deadline, one.job)):
        given[demand.job] = min(left, _need(demand, tokens_per_s, now))
        left -= given[demand.job]
    weights = sum(demand.weight for demand in demands)
    return {demand.job: given[demand.job] + max(0.0, left) * demand.weight / weights for demand in demands}


def _need(demand: Demand, tokens_per_s: float | None, now: float) -> float:
    if tokens_per_s is None:
        return 0.0
    return demand.tokens_left / max(LEAST_LEFT_S, demand.aim - now) / tokens_per_s


def finishes(demands: Sequence[Demand], tokens_per_s: float, now: float) -> dict[str, float]:
    """When each will be through, if nothing changes: at its share, or after all with nearer deadlines."""
    share = shares(demands, tokens_per_s, now)
    tokens_before, found = 0.0, {}
    for demand in sorted(demands, key=lambda one: (one.deadline, one.job)):
        tokens_before += demand.tokens_left
        last = tokens_before / tokens_per_s
        alone = demand.tokens_left / (share[demand.job] * tokens_per_s) if share[demand.job] > 0 else last
        found[demand.job] = now + min(alone, last)
    return found
