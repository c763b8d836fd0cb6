"""Cost models that have learnt some points, which are fitted once for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from alignedserve.cost.fit import OnlineCost, Point


def cost_of(points: Iterable[Point], slowdown: float = 1.0) -> OnlineCost:
    return _fitted(tuple(points), slowdown).copy()


@cache
def _fitted(points: tuple[Point, ...], slowdown: float) -> OnlineCost:
    return OnlineCost(points, slowdown=slowdown)
