"""Workers ordered by the work before them: the worker with the least is found at once, however many there are.

A wait is predicted, and grows shorter as time passes. So a worker is filed by the moment at which it will be through,
rounded; and as soon as a new prompt would wait there for hardly any time, it counts as idle. Among idle workers, and
among those that are through at the same time, the one whose requests hold the fewest tokens comes first: predictions of
waits that differ by less say nothing, and workers that hold more decode slower and are the first that lack memory.
"""

from __future__ import annotations

import heapq
from math import inf
from typing import Any

_SLACK = 64
_ROUNDED_S = 0.1
_IDLE_S = 0.25  # a wait that is as good as none


class Least:
    """A heap of names by their keys. A name may have several entries; only the entry with its present key counts."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[Any, ...]] = {}
        self._heap: list[tuple[Any, ...]] = []

    def put(self, entry: tuple[Any, ...]) -> None:
        """File the name, which is the last item of the entry."""
        name = entry[-1]
        if self._now.get(name) == entry:
            return
        self._now[name] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 4 * len(self._now) + _SLACK:
            self._heap = sorted(self._now.values())

    def remove(self, name: str) -> None:
        self._now.pop(name, None)

    def first(self) -> tuple[Any, ...] | None:
        """Return the least entry."""
        while self._heap and self._now.get(self._heap[0][-1]) != self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def least(self) -> str | None:
        """Return the name with the least entry."""
        first = self.first()
        return None if first is None else str(first[-1])


class Loads:
    """Workers by when they will be through, and by the tokens that their requests hold."""

    def __init__(self) -> None:
        self._busy, self._idle = Least(), Least()
        self.changed: set[str] = set()  # workers that are to be put before the next look

    def put(self, worker: str, through_at: float, tokens: int, now: float = -inf) -> None:
        at = round(through_at / _ROUNDED_S)
        if at * _ROUNDED_S <= now + _IDLE_S:
            self._busy.remove(worker)
            self._idle.put((tokens, worker))
        else:
            self._idle.remove(worker)
            self._busy.put((at, tokens, worker))

    def remove(self, worker: str) -> None:
        self.changed.discard(worker)
        self._busy.remove(worker)
        self._idle.remove(worker)

    def least(self, now: float) -> str | None:
        while (first := self._busy.first()) is not None and first[0] * _ROUNDED_S <= now + _IDLE_S:
            _, tokens, worker = first
            self._busy.remove(worker)
            self._idle.put((tokens, worker))
        idle = self._idle.first()
        if idle is not None:
            first = idle
        return None if first is None else str(first[-1])
