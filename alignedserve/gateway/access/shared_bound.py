"""A bound on what all callers together hold of a gateway: choices, bytes of bodies, open requests, open files.

A caller may hold as much as stays free, so that the next one finds room, however much others hold (dynamic thresholds,
as switches share their buffers). For example, of 120 places one caller gets 60. A second then finds 30, and a third 15.
Three that come and go get 30 each, and 30 stay free.

A caller with twice the mean weight of those that hold some may hold twice what stays free. A lower weight takes nothing
away: the bound is for floods, and turns at work go by weight. Without keys all are one caller, which may hold all.
"""

from __future__ import annotations

from collections import Counter

from alignedserve.gateway.access.keys import ANONYMOUS, Caller


class SharedBound:
    def __init__(self) -> None:
        self._held = Counter[str]()  # by caller
        self._weights: dict[str, int] = {}  # of callers that hold some

    def take(self, caller: Caller, amount: int, most: int) -> bool:
        """Hold this amount more for the caller, of `most` for all; return whether that leaves others enough. Less than
        was held is never refused."""
        free, own = most - self._held.total() - amount, self._held[caller.id] + amount
        weights = self._weights | {caller.id: caller.weight}
        times = max(1.0, caller.weight * len(weights) / sum(weights.values()))
        if amount > 0 and (free < 0 or (own > times * free and caller is not ANONYMOUS)):
            return False
        self._held[caller.id], self._weights = own, weights
        return True

    def give(self, caller: Caller, amount: int) -> None:
        """Free this amount of what the caller holds."""
        self._held[caller.id] -= amount
        if not self._held[caller.id]:
            del self._held[caller.id]
            self._weights.pop(caller.id, None)
