"""Who gets how much, of several jobs: first what each needs to be through in time, then by weight.

    needs   tokens left / seconds left / tokens per second of the system: the share that would just do
    shares  nearest deadline first, each gets what it needs; what is then left is divided by weight

Where there is not enough for all, as many are kept as can be (Moore and Hodgson): by deadline, and where that fails the
largest so far is given up. Those come last, whatever their deadlines: one job that cannot be kept is no reason to miss
another. They run where the others leave places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

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
    """They sum up to 1. While nobody knows how fast the system is, the nearest deadline has all: lines may take a good
    part of a short window, and what others got meanwhile might be what it lacks in the end."""
    left = 1.0
    given: dict[str, float] = {}
    for demand in _in_turn(demands, tokens_per_s, now):
        given[demand.job] = min(left, _need(demand, tokens_per_s, now))
        left -= given[demand.job]
    weights = sum(demand.weight for demand in demands)
    return {demand.job: given[demand.job] + max(0.0, left) * demand.weight / weights for demand in demands}


def _in_turn(demands: Sequence[Demand], tokens_per_s: float | None, now: float) -> list[Demand]:
    """By deadline, those that can be kept before those that cannot."""
    by_deadline = sorted(demands, key=lambda one: (one.deadline, one.job))
    if tokens_per_s is None:
        return by_deadline
    given_up = set[str]()
    largest: list[tuple[float, str]] = []  # (minus its tokens, job), a heap of those that are kept so far
    tokens = 0.0  # of these
    for demand in by_deadline:
        heappush(largest, (-demand.tokens_left, demand.job))
        tokens += demand.tokens_left
        if tokens > tokens_per_s * (demand.deadline - now):
            less, job = heappop(largest)
            tokens += less
            given_up.add(job)
    return sorted(by_deadline, key=lambda one: one.job in given_up)


def _need(demand: Demand, tokens_per_s: float | None, now: float) -> float:
    if tokens_per_s is None:
        return 1.0
    return demand.tokens_left / max(LEAST_LEFT_S, demand.aim - now) / tokens_per_s


def finishes(demands: Sequence[Demand], tokens_per_s: float, now: float) -> dict[str, float]:
    """When each will be through, if nothing changes: at its share, or after all that come before it."""
    share = shares(demands, tokens_per_s, now)
    tokens_before, found = 0.0, {}
    for demand in _in_turn(demands, tokens_per_s, now):
        tokens_before += demand.tokens_left
        last = tokens_before / tokens_per_s
        alone = demand.tokens_left / (share[demand.job] * tokens_per_s) if share[demand.job] > 0 else last
        found[demand.job] = now + min(alone, last)
    return found
