"""What a keeper asks of a host, which starts and ends parts, and the events by which a keeper hears of them.

processes.py runs each part as a process of this machine, actors.py as an actor of Ray.
"""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from alignedserve.shell.control import HeardOrder
from alignedserve.signs import Sign

if TYPE_CHECKING:
    from alignedserve.shell.part import PartSpec


@dataclass(frozen=True)
class PartBegan:
    """The process of this life of a part is there."""

    part: str
    incarnation: int


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


PartEvent: TypeAlias = PartBegan | PartEnded | PartTask
KeeperEvent: TypeAlias = PartEvent | TimeToLook | Ready | Sign | HeardOrder


class Events:
    """The events of a keeper, one after the other: what any thread reports, and what is due at a time."""

    def __init__(self) -> None:
        self._come: queue.SimpleQueue[KeeperEvent | None] = queue.SimpleQueue()
        # A heap of (when, number, task); timers would need threads, which a full machine does not give.
        self._due: list[tuple[float, int, PartTask]] = []
        self._numbers = itertools.count()  # of tasks at one time, the first comes first

    def put(self, event: KeeperEvent | None) -> None:
        """Add an event; None is a signal that says stop. Any thread may call this."""
        self._come.put(event)

    def ended(self, spec: PartSpec, how: object, failure: str = "") -> None:
        """Report that a part has ended. Any thread may call this."""
        self.put(PartEnded(spec.name, spec.incarnation, how, failure))

    def after(self, seconds: float, task: PartTask) -> None:
        """Add the task after this many seconds. Only the keeper's own thread may call this."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), task))

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


class NoAnswer(Exception):
    """The host does not answer in time: nothing is known of the part."""


@dataclass(frozen=True)
class NewPlace:
    """The place of a worker that was not planned."""

    pools: Sequence[str] = ()  # pools to start with the worker
    lacks: str = ""  # why the worker waits for a place, if it does


class Host(ABC):
    """Starts and ends parts. All but `events` is used by the keeper's own thread alone."""

    WHY_LEFT = "the system has not ended them yet"
    numbers_devices = True  # whether each rank of a worker has a number of its own, for its GPU
    is_ending = False  # whether no part is started again
    is_hurried = False  # by a second signal

    def __init__(self) -> None:
        self.events = Events()

    @abstractmethod
    def start(self, spec: PartSpec) -> None:
        """Start the part; report that its process is there, and once that it has ended."""

    @abstractmethod
    def ask_to_stop(self, parts: Collection[str]) -> None:
        """Have the parts stop by themselves."""

    @abstractmethod
    def hand_on(self, spec: PartSpec) -> None:
        """Give a part that is alive its new settings, without waiting for it."""

    @abstractmethod
    def end(self, part: str) -> None:
        """End the part now, whatever it is doing; do nothing if it has ended already."""

    def forget(self, part: str) -> None:  # noqa: B027  (not all hosts keep something)
        """Free what was kept for a part that has ended for good."""

    def make_place(self, worker: str) -> NewPlace:
        """Make a place for a worker that was not planned."""
        return NewPlace()

    def goes_with(self, worker: str) -> Sequence[str]:
        """Return the workers and pools that are of no use after this worker has gone."""
        return ()

    def pids(self) -> Mapping[str, int]:
        """Return the process of each part that is there, where the next launcher can go on with it."""
        return {}


def say(line: str) -> None:
    print(f"alignedserve: {line}", file=sys.stderr, flush=True)
