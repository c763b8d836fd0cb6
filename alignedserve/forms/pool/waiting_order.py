"""The order in which requests wait in the pool: the request with the longest expected wait is compressed first.

scheduling/levels.py has the formula (ALISE §3.2), lengths.py the predicted lengths of answers.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        ask, policy = self._ask, self._policy
        as_served = policy.ordering.of_waits.sort(waiting, lambda of: of.standing(ask, now), ask.times, policy.late)

        def in_line(of: WaitsInPool) -> InLine:
            tokens = tokens_left(of.entry.request, policy, len(of.entry.output))
            return InLine(tokens * ask.times.mean_s, now - of.since, None if of.promise.is_rt else level_of(tokens))

        return shortest_wait_first(list(as_served), in_line, self._mean_batch, policy.age_s)[::-1]
