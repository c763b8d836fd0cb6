"""Divide the system among callers, and each caller's part among its jobs.

    need    tokens left / seconds left / tokens per second of the system: the share of a job that is just enough
    part    of a caller: what its jobs need, or its part by weight where callers need more than there is; what is left
            is divided by weight too
    share   of a job: a caller's jobs get their needs in order of deadline; the rest of its part is divided by weight

For example, a caller with one batch beside another's hundred has half of the system as long as it needs that.

If there is not enough for all jobs of a caller, as many as possible end in time (Moore and Hodgson): go through the
jobs by deadline, and whenever a deadline cannot be met, give up the largest job so far. Jobs that are given up come
last, whatever their deadlines, so that a job that cannot end in time makes no other job late. They run in places that
the other jobs leave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from alignedserve.scheduling.parts import part_of_one

LEAST_LEFT_S = 1.0  # the least time that a need is computed with, also past the deadline


@dataclass(frozen=True)
class JobDemand:
    """The demand of a job with unfinished lines."""

    job: str
    deadline: float
    aim: float  # before the deadline, because speeds and lengths change, and the last lines take their time
    weight: float  # among the caller's jobs
    tokens_left: float
    caller: str = ""
    caller_weight: int = 1


def shares(demands: Sequence[JobDemand], tokens_per_s: float | None, now: float) -> dict[str, float]:
    """Return each job's share of the system; the shares add up to 1.

    While the system's speed is unknown, the job of a caller with the nearest deadline gets all of the caller's part:
    its lines may take a good part of a short window, and a share given to other jobs meanwhile could be what it lacks
    in the end."""
    found: dict[str, float] = {}
    for part, jobs in _by_caller(demands, tokens_per_s, now):
        left, weights = part, sum(demand.weight for demand in jobs)
        for demand in jobs:
            found[demand.job] = min(left, _need(demand, tokens_per_s, now))
            left -= found[demand.job]
        for demand in jobs:
            found[demand.job] += left * demand.weight / weights
    return found


def _by_caller(
    demands: Sequence[JobDemand], tokens_per_s: float | None, now: float
) -> Iterator[tuple[float, list[JobDemand]]]:
    """Yield each caller's part of the system, and its jobs in their order; the parts add up to 1."""
    jobs: defaultdict[tuple[str, int], list[JobDemand]] = defaultdict(list)
    for demand in demands:
        jobs[demand.caller, demand.caller_weight].append(demand)
    needs = {of: min(1.0, sum(_need(demand, tokens_per_s, now) for demand in some)) for of, some in jobs.items()}
    one = part_of_one([(need, weight) for (_, weight), need in needs.items()], 1.0)
    parts = {(caller, weight): min(need, one * weight) for (caller, weight), need in needs.items()}
    left, weights = max(0.0, 1.0 - sum(parts.values())), sum(weight for _, weight in parts)
    for (caller, weight), some in jobs.items():
        part = parts[caller, weight] + left * weight / weights
        yield part, _in_order(some, None if tokens_per_s is None else part * tokens_per_s, now)


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
    share, finish_at = shares(demands, tokens_per_s, now), dict[str, float]()
    for part, jobs in _by_caller(demands, tokens_per_s, now):
        tokens_before = 0.0
        for demand in jobs:
            tokens_before += demand.tokens_left
            last_s = tokens_before / (part * tokens_per_s) if part > 0 else 0.0  # nothing is left of its jobs
            alone_s = demand.tokens_left / (share[demand.job] * tokens_per_s) if share[demand.job] > 0 else last_s
            finish_at[demand.job] = now + min(alone_s, last_s)
    return finish_at
