"""Workers ordered by the work before them: the worker with the least is found at once, however many there are."""

from __future__ import annotations

import heapq

Load = tuple[float, int, str]  # (predicted seconds, number of requests, name of the worker)
_SLACK = 64


class Loads:
    """A heap in which a worker may have several entries; only the entry with its present load counts."""

    def __init__(self) -> None:
        self._now: dict[str, Load] = {}
        self._heap: list[Load] = []

    def put(self, load: Load) -> None:
        name = load[2]
        if self._now.get(name) == load:
            return
        self._now[name] = load
        heapq.heappush(self._heap, load)
        if len(self._heap) > 4 * len(self._now) + _SLACK:
            self._heap = sorted(self._now.values())

    def remove(self, name: str) -> None:
        self._now.pop(name, None)

    def least(self) -> str | None:
        while self._heap and self._now.get(self._heap[0][2]) != self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None
