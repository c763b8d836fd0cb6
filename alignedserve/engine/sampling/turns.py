"""Does the work of several callers in one thread, each in its turn: nobody waits for all that another has ordered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from alignedserve.kernels.common.threads import compute_alone


class Turns:
    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name, initializer=compute_alone)  # starts with the first work
        self._lock = Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # by caller; the first one's turn is now

    def add(self, caller: str, work: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.setdefault(caller, deque()).append(work)
        self._thread.submit(self._next)

    def _next(self) -> None:
        with self._lock:
            caller, waiting = next(iter(self._waiting.items()))
            work = waiting.popleft()
        try:
            work()
        finally:
            with self._lock:
                del self._waiting[caller]
                if waiting:
                    self._waiting[caller] = waiting  # behind those who came meanwhile
