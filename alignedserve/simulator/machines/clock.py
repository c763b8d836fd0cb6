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
        self.now = 0.0  # for others to read: twenty times in a step
        self._serials = count()
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []

    def at(self, time: float, priority: Priority, happen: Callable[[], None]) -> None:
        """Nothing happens in the past: what is due already happens next."""
        now = self.now
        heapq.heappush(self._heap, (time if time > now else now, priority, next(self._serials), happen))

    def run(self, until: float, ended: Callable[[], bool] = lambda: False) -> None:
        """Until this time, or until `ended` says so."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until and not ended():
            self.now, _, _, happen = pop(heap)
            happen()
        if not ended():
            self.now = max(self.now, until)
