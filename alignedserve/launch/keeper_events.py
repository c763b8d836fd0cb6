"""What a keeper hears, one event after the other: what any thread reports, and what is due at a time."""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from alignedserve.shell.control import HeardOrder
from alignedserve.signs import Sign


@dataclass(frozen=True)
class PartEnded:
    part: str
    incarnation: int
    how: object  # for the log
    failure: str  # why the part cannot run, in words for the user; empty if it just ended


@dataclass(frozen=True)
class PartTask:
    """A task for the keeper's own thread, unless this life of the part has ended by then."""

    part: str
    incarnation: int
    act: Callable[[], None]


@dataclass(frozen=True)
class TimeToLook:
    """Nothing has happened for a while."""


@dataclass(frozen=True)
class Ready:
    """The deployment takes requests."""

    greeting: str


KeeperEvent: TypeAlias = PartEnded | PartTask | TimeToLook | Ready | Sign | HeardOrder


class KeeperEvents:
    def __init__(self) -> None:
        self._come: queue.SimpleQueue[KeeperEvent | None] = queue.SimpleQueue()
        # A heap of (when, number, event); timers would need threads, which a full machine does not give.
        self._due: list[tuple[float, int, KeeperEvent]] = []
        self._numbers = itertools.count()  # of events at one time, the first comes first

    def put(self, event: KeeperEvent | None) -> None:
        """Add an event; None is a signal that says stop. Any thread may call this."""
        self._come.put(event)

    def after(self, seconds: float, event: KeeperEvent) -> None:
        """Add the event after this many seconds. Only the keeper's own thread may call this."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), event))

    def is_empty(self) -> bool:
        return self._come.empty()

    def next(self, within_s: float = math.inf) -> KeeperEvent | None:
        """Return the next event; after this time without one, that it is time to look."""
        if self._due:
            within_s = min(within_s, self._due[0][0] - time.monotonic())
        try:
            return self._come.get(timeout=None if within_s == math.inf else max(0.0, within_s))
        except queue.Empty:
            is_due = bool(self._due) and self._due[0][0] <= time.monotonic()
            return heapq.heappop(self._due)[-1] if is_due else TimeToLook()
