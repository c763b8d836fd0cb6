"""Virtual time, and what happens in it: one total order, (time, priority, serial), written here and nowhere else."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from itertools import count


class Priority(IntEnum):
    """What comes first of what happens at the same time."""

    FAULT = 0
    WORK = 1
    FRAME = 2
    TIMER = 3
    CLIENT = 4


class Agenda:
    def __init__(self) -> None:
        self._now = 0.0
        self._serials = count()
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []

    def now(self) -> float:
        return self._now

    def at(self, time: float, priority: Priority, happen: Callable[[], None]) -> None:
        """Nothing happens in the past: what is due already happens next."""
        heapq.heappush(self._heap, (max(time, self._now), priority, next(self._serials), happen))

    def run(self, until: float, ended: Callable[[], bool] = lambda: False) -> None:
        """Until this time, or until `ended` says so."""
        while self._heap and self._heap[0][0] <= until and not ended():
            self._now, _, _, happen = heapq.heappop(self._heap)
            happen()
        if not ended():
            self._now = max(self._now, until)
