"""Virtual time and its events in one total order, (time, priority, serial), which is written here and nowhere else."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from itertools import count


class Priority(IntEnum):
    """The order of events that happen at the same time."""

    FAULT = 0
    WORK = 1
    FRAME = 2
    TIMER = 3
    CLIENT = 4


class Agenda:
    """The virtual time, and the events that are still to happen."""

    def __init__(self) -> None:
        self.now = 0.0  # a plain attribute because others read it about twenty times in a step
        self._serials = count()
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []

    def at(self, time: float, priority: Priority, happen: Callable[[], None]) -> None:
        """Plan an event. Nothing happens in the past: an event that is due already happens next."""
        now = self.now
        heapq.heappush(self._heap, (time if time > now else now, priority, next(self._serials), happen))

    def run(self, until: float, ended: Callable[[], bool] = lambda: False) -> None:
        """Let events happen until this time, or until `ended` returns true."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until and not ended():
            self.now, _, _, happen = pop(heap)
            happen()
        if not ended():
            self.now = max(self.now, until)
