"""What comes in the owner's thread, to those who wait for it on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Arrivals(Generic[T]):
    """One wake-up of the event loop for all that has come until it is awake: a step's tokens come together."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Queue[T]] = {}  # by request; on the event loop
        self._come: deque[tuple[str, T]] = deque()
        self._is_waking = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def of(self, request: str) -> Iterator[asyncio.Queue[T]]:
        """What comes for this request from now on, in its order."""
        self._loop = asyncio.get_running_loop()
        queue = self._waiting[request] = asyncio.Queue()
        try:
            yield queue
        finally:
            del self._waiting[request]

    def put(self, request: str, one: T) -> None:
        """From any thread; for a request that nobody waits for any more it is dropped."""
        self._come.append((request, one))
        if not self._is_waking and self._loop is not None:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
                self._loop.call_soon_threadsafe(self._hand_out)

    def put_to_all(self, one: T) -> None:
        """On the event loop."""
        for queue in self._waiting.values():
            queue.put_nowait(one)

    def _hand_out(self) -> None:
        self._is_waking = False  # before the first is taken: what comes after that wakes us again
        while self._come:
            request, one = self._come.popleft()
            if (queue := self._waiting.get(request)) is not None:
                queue.put_nowait(one)
