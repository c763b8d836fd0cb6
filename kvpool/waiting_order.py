"""Who waits longest (ALISE §3.2): the expected waiting time of each request in the pool.

    EWT = min( predicted time of all ahead / average batch,   it is served when those ahead of it have been
               age x (level + 1) - waited )                   or when it has grown so old that it comes first

Who has longest to wait can do without its pages for longest: it is compressed first. A decode worker has its candidate
requests in the same order, and lets go of those first that have longest to wait.

What is predicted of lengths of answers is what promise.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from alignedserve.core import Entry
from alignedserve.kvpool.grouping import Waiting
from alignedserve.levels import AGE_S, level_of
from alignedserve.messages import AskBatch
from alignedserve.policy import Order, Policy
from alignedserve.promise import tokens_left
from alignedserve.slo import in_order

T = TypeVar("T")
_WEIGHT = 0.1  # of the newest ask in the mean batch


@dataclass(frozen=True, slots=True)
class InLine:
    """One that waits, as the formula sees it."""

    predicted_s: float  # what it takes by itself, once it runs
    waited_s: float
    level: int | None  # None of one that has no levels: it grows no older


def expected_waits(line: Iterable[InLine], mean_batch: float, age_s: float = AGE_S) -> Iterator[float]:
    """Of each, where they are served in this order, so many at a time."""
    ahead_s = 0.0
    for one in line:
        by_age = inf if one.level is None else age_s * (one.level + 1) - one.waited_s
        yield max(0.0, min(ahead_s / mean_batch, by_age))
        ahead_s += one.predicted_s


def shortest_wait_first(
    line: Sequence[T], as_seen: Callable[[T], InLine], mean_batch: float, age_s: float = AGE_S
) -> list[T]:
    """Those that are served in this order; of two that wait as long, the one that is served earlier comes first."""
    waits = list(expected_waits(map(as_seen, line), mean_batch, age_s))
    return [line[at] for at in sorted(range(len(line)), key=lambda at: (waits[at], at))]


class WaitingOrder:
    """What the pool has heard of its decode workers, and the order that follows."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ask = AskBatch(0, 0)  # the last one
        self._mean_batch = 1.0

    def heard(self, ask: AskBatch) -> None:
        """How many run there is what its places do not have room for."""
        running = max(1, ask.most_requests - ask.requests)
        self._ask = ask
        self._mean_batch += _WEIGHT * (running - self._mean_batch)

    def longest_first(self, waiting: Sequence[Waiting], now: float) -> list[Waiting]:
        """By EWT; of two that wait as long, the one that is served later comes first."""
        line, age_s = self._as_served(waiting, now), self._policy.age_s
        return shortest_wait_first(line, lambda one: self._in_line(one, now), self._mean_batch, age_s)[::-1]

    def _as_served(self, waiting: Sequence[Waiting], now: float) -> Sequence[Waiting]:
        if self._policy.order is Order.FCFS:
            return waiting
        by_name = {one.id: one for one in waiting}
        standings = (one.standing(self._ask, now) for one in waiting)
        return [by_name[one.id] for one in in_order(standings, self._ask.times, self._policy.late)]

    def _in_line(self, waiting: Waiting, now: float) -> InLine:
        tokens = self._tokens_left(waiting.entry)
        level = None if waiting.promise.is_rt else level_of(tokens)
        return InLine(tokens * self._ask.times.mean_s, now - waiting.since, level)

    def _tokens_left(self, entry: Entry) -> int:
        return tokens_left(entry.request, self._policy, len(entry.output))
