"""Clients that were refused and told when to come again, until they have: of one class.

They are before whoever is refused next. So of many that are refused at once each is told a later time, and does not
find the others there again.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

_MOST = 4096  # remembered; by then the next one is told the longest time anyway


@dataclass(frozen=True, slots=True)
class Returns:
    """What is to come again, all together."""

    requests: int = 0
    tokens: int = 0  # of their prompts
    memory: int = 0  # tokens that they want


class Returning:
    def __init__(self) -> None:
        self._told: list[tuple[float, int, int]] = []  # a heap: when, tokens of the prompt, tokens wanted
        self._tokens, self._memory = 0, 0

    def told(self, at: float, tokens: int, memory: int) -> None:
        if len(self._told) == _MOST:
            return
        heapq.heappush(self._told, (at, tokens, memory))
        self._tokens += tokens
        self._memory += memory

    def before(self, now: float) -> Returns:
        while self._told and self._told[0][0] <= now:
            _, tokens, memory = heapq.heappop(self._told)
            self._tokens -= tokens
            self._memory -= memory
        return Returns(len(self._told), self._tokens, self._memory)
