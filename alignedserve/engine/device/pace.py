"""The pace of copies beside the steps: at full speed while no step runs, else in few turns.

On a CPU a copy takes time of the cores and of memory from the step that runs at the same time: at worst the step stands
still for as long as the copy computes. So while a step runs, all copies beside it together compute for `SHARE` of the
time: on any machine the step takes at most 1 / (1 - SHARE) of the time that it would take alone. For copies and steps
alike, time on a core counts, not time on the clock: other processes may use the same cores, and where the step gets a
tenth of them, so do the copies. Everything counts that the copying thread computes, also between its turns. After a
rest, the time for a turn is saved up before the turn begins: otherwise a series of steps that is shorter than the cost
of one turn would pay more than its share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.04  # of a step's time: a step may take at most 5 % longer, and also finds less of its data in the caches
IDLE_S = 0.01  # a shorter time without a step is a gap between two steps
_TICK_S = 0.001


class _Own(threading.local):
    """State of one thread that takes turns."""

    counted_s: float | None = None  # the part of its computing time that has been counted


class CopyPace:
    def __init__(self, share: float = SHARE, threads: int = 1) -> None:
        """`threads` is the number of threads that a step computes in."""
        self._share, self._threads = share, threads
        self._changed = threading.Condition()
        self._is_stepping, self._stepped_at = False, -IDLE_S
        self._num_turns = 0  # turns under way: more than one only while no step runs
        self._next_at = 0.0  # while a step runs, no turn begins before this computing time per core (`_computed_s`)
        self._turn_s = 0.0  # seconds of the newest turn
        self._own = _Own()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold copies to their share while a step runs."""
        with self._changed:
            if self._idle_in_s() <= 0:
                self._next_at = max(self._next_at, self._computed_s() + self._turn_s * (1 / self._share - 1))
            was_stepping, self._is_stepping = self._is_stepping, True  # in a pause of a step, another may run
        try:
            yield
        finally:
            with self._changed:
                self._is_stepping, self._stepped_at = was_stepping, time.monotonic()
                self._changed.notify_all()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until a turn is due, then measure a piece of a copy, with the thread's work since its last turn."""
        self._await_turn()
        counted_s = time.thread_time() if self._own.counted_s is None else self._own.counted_s
        try:
            yield
        finally:
            self._own.counted_s = time.thread_time()
            self._end_turn(self._own.counted_s - counted_s)

    def _await_turn(self) -> None:
        with self._changed:
            while (idle_in := self._idle_in_s()) > 0 and (self._num_turns or self._computed_s() < self._next_at):
                due_in = None if self._num_turns else self._next_at - self._computed_s() + _TICK_S
                self._changed.wait(due_in if self._is_stepping else idle_in)
            self._num_turns += 1

    def _end_turn(self, seconds: float) -> None:
        with self._changed:
            self._num_turns -= 1
            self._turn_s = seconds
            if self._idle_in_s() > 0:
                self._next_at = self._computed_s() + seconds * (1 / self._share - 1)
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Return whether no step runs, and none has just ended."""
        with self._changed:
            return self._idle_in_s() <= 0

    def _idle_in_s(self) -> float:
        """Return the seconds until the worker is idle, 0 or less if it is: just after a step the next may begin."""
        return 1.0 if self._is_stepping else self._stepped_at + IDLE_S - time.monotonic()

    def _computed_s(self) -> float:
        """Return the seconds that this process has computed, per core that a step uses."""
        return time.process_time() / self._threads
