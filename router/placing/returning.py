"""Clients of one class that were refused and told when to come again, until that time has come.

They come before clients that are refused later. So of many clients that are refused at once, each is told a later
time, and they do not all come back at the same moment.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

_MOST = 4096  # clients that are remembered; from there on each is told the longest time anyway


@dataclass(frozen=True, slots=True)
class Returns:
    """The sum of all requests that are to come again."""

    requests: int = 0
    tokens: int = 0  # tokens of their prompts
    memory: int = 0  # tokens of memory that they need


class Returning:
    def __init__(self) -> None:
        self._expected: list[tuple[float, int, int]] = []  # a heap: (time, tokens of the prompt, tokens of memory)
        self._tokens, self._memory = 0, 0

    def add(self, at: float, tokens: int, memory: int) -> None:
        if len(self._expected) == _MOST:
            return
        heapq.heappush(self._expected, (at, tokens, memory))
        self._tokens += tokens
        self._memory += memory

    def before(self, now: float) -> Returns:
        """Return what is still to come again, and forget clients whose time has come."""
        while self._expected and self._expected[0][0] <= now:
            _, tokens, memory = heapq.heappop(self._expected)
            self._tokens -= tokens
            self._memory -= memory
        return Returns(len(self._expected), self._tokens, self._memory)
