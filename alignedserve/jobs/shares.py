"""Divide the system among jobs: first the share that each job needs to end in time, then the rest by weight.

    need    tokens left / seconds left / tokens per second of the system: the share that is just enough
    shares  jobs get their needs in order of deadline; the rest is divided by weight

If there is not enough for all jobs, as many as possible end in time (Moore and Hodgson): go through the jobs by
deadline, and whenever a deadline cannot be met, give up the largest job so far. Jobs that are given up come last,
whatever their deadlines, so that a job that cannot end in time makes no other job late. They run in places that the
other jobs leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

LEAST_LEFT_S = 1.0  # the least time that a need is computed with, also past the deadline


@dataclass(frozen=True)
class JobDemand:
    """The demand of a job with unfinished lines."""

    job: str
    deadline: float
    aim: float  # before the deadline, because speeds and lengths change, and the last lines take their time
    weight: float
    tokens_left: float


def shares(demands: Sequence[JobDemand], tokens_per_s: float | None, now: float) -> dict[str, float]:
    """Return each job's share of the system; the shares add up to 1.

    While the system's speed is unknown, the job with the nearest deadline gets everything: its lines may take a good
    part of a short window, and a share given to other jobs meanwhile could be what it lacks in the end."""
    left = 1.0
    needs: dict[str, float] = {}
    for demand in _in_order(demands, tokens_per_s, now):
        needs[demand.job] = min(left, _need(demand, tokens_per_s, now))
        left -= needs[demand.job]
    weights = sum(demand.weight for demand in demands)
    return {demand.job: needs[demand.job] + max(0.0, left) * demand.weight / weights for demand in demands}


def _in_order(demands: Sequence[JobDemand], tokens_per_s: float | None, now: float) -> list[JobDemand]:
    """Return the jobs by deadline, those that can end in time before those that cannot."""
    by_deadline = sorted(demands, key=lambda demand: (demand.deadline, demand.job))
    if tokens_per_s is None:
        return by_deadline
    given_up = set[str]()
    largest: list[tuple[float, str]] = []  # (minus its tokens, job): a heap of the jobs that can end in time so far
    tokens = 0.0  # of the jobs in the heap
    for demand in by_deadline:
        heappush(largest, (-demand.tokens_left, demand.job))
        tokens += demand.tokens_left
        if tokens > tokens_per_s * (demand.deadline - now):
            negative, job = heappop(largest)
            tokens += negative
            given_up.add(job)
    return sorted(by_deadline, key=lambda demand: demand.job in given_up)


def _need(demand: JobDemand, tokens_per_s: float | None, now: float) -> float:
    if tokens_per_s is None:
        return 1.0
    return demand.tokens_left / max(LEAST_LEFT_S, demand.aim - now) / tokens_per_s


def finishes(demands: Sequence[JobDemand], tokens_per_s: float, now: float) -> dict[str, float]:
    """Return when each job will end if nothing changes: at the speed of its share, or after all jobs before it."""
    share = shares(demands, tokens_per_s, now)
    tokens_before, finish_at = 0.0, {}
    for demand in _in_order(demands, tokens_per_s, now):
        tokens_before += demand.tokens_left
        last_s = tokens_before / tokens_per_s
        alone_s = demand.tokens_left / (share[demand.job] * tokens_per_s) if share[demand.job] > 0 else last_s
        finish_at[demand.job] = now + min(alone_s, last_s)
    return finish_at
