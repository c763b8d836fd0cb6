"""The copies of single tokens' vectors that are due before a step, collected while the step is planned (BROS §5.2).

The device reads all sources of an order before it writes any target. So a copy from, or to, a target of the newest
order begins another order. For example, slot 7 moves to slot 9, then slot 9 goes to the host: two orders.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.forms.orders import CopySlots


class SlotCopies:
    """A number below 0 is ~place: memory on the host."""

    def __init__(self) -> None:
        self._orders: list[dict[int, int]] = [{}]  # target -> source

    def add(self, source: int, target: int) -> None:
        if source in self._orders[-1] or target in self._orders[-1]:
            self._orders.append({})
        self._orders[-1][target] = source

    def take(self) -> Sequence[CopySlots]:
        """Return what there is to copy, once."""
        orders, self._orders = self._orders, [{}]
        return [_order(copies) for copies in orders if copies]


def _order(copies: dict[int, int]) -> CopySlots:
    return CopySlots(
        tuple([(source, ~target) for target, source in copies.items() if target < 0]),
        tuple([(~source, target) for target, source in copies.items() if source < 0]),
        tuple([(source, target) for target, source in copies.items() if min(source, target) >= 0]),
    )
