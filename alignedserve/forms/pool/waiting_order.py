"""The order in which requests wait in the pool: the request with the longest expected wait is compressed first.

scheduling/levels.py has the formula (ALISE §3.2), lengths.py the predicted lengths of answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.core import Entry
from alignedserve.kvpool.memory.rewriting import WaitsInPool
from alignedserve.protocol.messages import AskBatch
from alignedserve.scheduling.lengths import tokens_left
from alignedserve.scheduling.levels import InLine, level_of, shortest_wait_first
from alignedserve.scheduling.policy import Policy

_WEIGHT = 0.1  # weight of the newest ask in the mean batch


class WaitingOrder:
    """The pool's knowledge of its decode workers, and the order of waiting requests by that."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ask = AskBatch(0, 0)  # the newest ask
        self._mean_batch = 1.0

    def heard(self, ask: AskBatch) -> None:
        """Learn from an ask how many requests run there: all places of the worker less the free places."""
        running = max(1, ask.most_requests - ask.requests)
        self._ask = ask
        self._mean_batch += _WEIGHT * (running - self._mean_batch)

    def longest_first(self, waiting: Sequence[WaitsInPool], now: float) -> list[WaitsInPool]:
        """Return the requests, longest expected wait first; among equals the request that is served later first."""
        line, age_s = self._as_served(waiting, now), self._policy.age_s
        return shortest_wait_first(line, lambda entry: self._in_line(entry, now), self._mean_batch, age_s)[::-1]

    def _as_served(self, waiting: Sequence[WaitsInPool], now: float) -> Sequence[WaitsInPool]:
        ask, order = self._ask, self._policy.ordering.of_waits
        return list(order.sort(waiting, lambda entry: entry.standing(ask, now), ask.times, self._policy.late))

    def _in_line(self, waiting: WaitsInPool, now: float) -> InLine:
        tokens = self._tokens_left(waiting.entry)
        level = None if waiting.promise.is_rt else level_of(tokens)
        return InLine(tokens * self._ask.times.mean_s, now - waiting.since, level)

    def _tokens_left(self, entry: Entry) -> int:
        return tokens_left(entry.request, self._policy, len(entry.output))
