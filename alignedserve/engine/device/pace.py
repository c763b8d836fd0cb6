"""How fast is copied beside the steps: as fast as it goes while there are none, else in turns that are few.

On a CPU a copy takes time of the cores, and memory's, from the step that runs meanwhile: at worst the step stands still
for as long as the copy computes. So while a step runs, all copies beside it together compute for `SHARE` of the time:
the step takes at most 1 / (1 - SHARE) of what it would take alone, whatever machine it is. What counts is time on a
core, not on the clock, of the copies as of the step: others may use the same cores, and where the step gets a tenth of
them, so do the copies. All counts that the copying thread computes, between its turns too. After a rest the time for a
turn is saved before it begins: else a row of steps that is shorter than what one turn costs would pay for more than its
share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SHARE = 0.04  # of a step's time: it also finds less of its own in the caches, and is to take at most 5 % longer
IDLE_S = 0.01  # a shorter time without a step is one between two of them
_TICK_S = 0.001
_TASKS = Path("/proc/self/task")


class _Own(threading.local):
    """Of each thread that takes turns."""

    counted_s: float | None = None  # of the time that it has computed, what has been counted


class Pace:
    def __init__(self, share: float = SHARE, threads: int = 1) -> None:
        """`threads` are those that a step computes in."""
        self._share, self._threads = share, threads
        self._helpers_s: Callable[[], float] = lambda: 0.0
        self._changed = threading.Condition()
        self._is_stepping, self._stepped_at = False, -IDLE_S
        self._num_turns = 0  # that are under way: more than one only while no step runs
        self._next_at = 0.0  # no turn begins before, while a step runs; by the time that a core has computed
        self._turn_s = 0.0  # that the last turn took
        self._helped_s = 0.0  # of the helpers' time, what has been counted
        self._own = _Own()

    def count(self, helpers_s: Callable[[], float]) -> None:
        """What threads that copy for others, such as those of torch.distributed, have computed so far."""
        self._helpers_s = helpers_s

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step runs."""
        with self._changed:
            if self._idle_in_s() <= 0:
                self._next_at = max(self._next_at, self._computed_s() + self._turn_s * (1 / self._share - 1))
            self._is_stepping = True
        try:
            yield
        finally:
            with self._changed:
                self._is_stepping, self._stepped_at = False, time.monotonic()
                self._changed.notify_all()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A piece of a copy: it begins when that is due, and is measured, with what its thread computed before it."""
        self._await_turn()
        counted_s = time.thread_time() if self._own.counted_s is None else self._own.counted_s
        try:
            yield
        finally:
            self._own.counted_s = time.thread_time()
            self._done(self._own.counted_s - counted_s)

    def _await_turn(self) -> None:
        with self._changed:
            while (idle_in := self._idle_in_s()) > 0 and (self._num_turns or self._computed_s() < self._next_at):
                due_in = None if self._num_turns else self._next_at - self._computed_s() + _TICK_S
                self._changed.wait(due_in if self._is_stepping else idle_in)
            self._num_turns += 1

    def _done(self, seconds: float) -> None:
        with self._changed:
            self._num_turns -= 1
            helped = self._helpers_s()
            seconds += max(0.0, helped - self._helped_s)
            self._helped_s, self._turn_s = helped, seconds
            if self._idle_in_s() > 0:
                self._next_at = self._computed_s() + seconds * (1 / self._share - 1)
            self._changed.notify_all()

    def _idle_in_s(self) -> float:
        """Nothing, or less, where no step runs, and none has just ended: the next one may begin at any moment."""
        return 1.0 if self._is_stepping else self._stepped_at + IDLE_S - time.monotonic()

    def _computed_s(self) -> float:
        """By this process, for each core that a step uses."""
        return time.process_time() / self._threads


class SecondsOfThreads:
    """What the threads of this process that have that name have computed, in all; they are looked up once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: list[Path] = []

    def __call__(self) -> float:
        if not self._tasks and _TASKS.is_dir():
            self._tasks = [task for task in _TASKS.iterdir() if _read(task / "comm").strip() == self._name]
        return sum(int((_read(task / "schedstat").split() or ["0"])[0]) for task in self._tasks) / 1e9


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended, or this system does not say
        return ""
