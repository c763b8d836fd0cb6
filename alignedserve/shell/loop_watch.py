"""Watch that the loops of a process turn: the process of a loop that stands still ends, and starts again.

    watch (a thread) ── wakes ──▶ turn loop, event loop
       │ ◀──────────── turns ──────────┘
       ├─ all have turned: a sign of life ──▶ launcher, which ends a process that it does not hear (launch/starts.py)
       └─ a loop has not for `still_s`: where it stands goes to the log, and this process ends

Nobody else would notice: heartbeats have a thread of their own, so that a loop that is busy for a moment is not taken
for dead. The watch counts how often it has looked, not the time: a process that was suspended has not stood still.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alignedserve.signs import ExitCode

log = logging.getLogger("alignedserve.shell")

STILL_S = 30.0  # that a loop may stand still
LOOKS = 6  # in that time


class _WatchedLoop:
    def __init__(self, name: str, wake: Callable[[], None], is_busy: Callable[[], bool]) -> None:
        self.name, self.wake, self.is_busy, self.thread = name, wake, is_busy, threading.get_ident()
        self.has_turned, self.num_still = True, 0

    def turns(self) -> None:
        self.has_turned = True

    def look(self) -> None:
        self.num_still = 0 if self.has_turned or self.is_busy() else self.num_still + 1
        self.has_turned = False
        self.wake()


class LoopWatch:
    """The watch over all loops of this process."""

    def __init__(self, still_s: float = STILL_S, is_alive: Callable[[], None] = lambda: None) -> None:
        """`is_alive` is called as long as all loops turn, LOOKS times in `still_s`."""
        self._still_s, self._is_alive = still_s, is_alive
        self._loops: list[_WatchedLoop] = []
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._beginning = threading.Lock()

    def begin(self) -> None:
        """Give signs of life from now on."""
        with self._beginning:  # two loops of a process may begin at once
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="loop-watch", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Look no more, and give no more signs of life: what remains of this process's end has to be short."""
        self._has_ended.set()

    @contextmanager
    def over(
        self, name: str, wake: Callable[[], None], is_busy: Callable[[], bool] = lambda: False
    ) -> Iterator[Callable[[], None]]:
        """Watch the loop of this thread, which calls what is yielded at each turn, and takes one after `wake`.

        It may stand still while it `is_busy` with work that has a limit of its own."""
        loop = _WatchedLoop(name, wake, is_busy)
        self._loops.append(loop)
        self.begin()
        try:
            yield loop.turns
        finally:
            self._loops.remove(loop)

    def _look(self) -> None:
        while not self._has_ended.wait(self._still_s / LOOKS):
            loops = self._loops.copy()
            for loop in loops:
                loop.look()
                if loop.num_still >= LOOKS:
                    self._end(loop)
            if not any(loop.num_still for loop in loops):
                self._is_alive()

    def _end(self, loop: _WatchedLoop) -> None:
        at = traceback.extract_stack(sys._current_frames()[loop.thread])[-1]
        place = f"{at.filename}:{at.lineno} ({at.name})"
        ends = "this process ends, and starts again"
        log.error("the %s has stood still for %.0f s, at %s: %s", loop.name, self._still_s, place, ends)
        faulthandler.dump_traceback()
        os._exit(ExitCode.BROKEN)
