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
from ctypes import c_ulong, py_object, pythonapi
from threading import Event, Lock, Thread, get_ident
from time import monotonic
from types import FrameType

from alignedserve.policies.guard import Limit, NoAnswer
from alignedserve.shell.exit_code import ExitCode

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


MOST_S = 5.0  # for an answer


class AnswerLimit(Limit):
    """Ends a custom policy that does not answer, since the part that asked it hangs meanwhile.

        with limit:            a question is open
            policy.key(...)    ◀─ NoAnswer, raised here by a thread that looks now and then whether it is still the same

    Python raises it between two of its own instructions: a policy that waits in code that is not Python is ended
    when that code returns. Only the thread that asks enters the limit, for one question at a time. A scheduler
    calls code of ours, which may be about to change memory: nothing is raised there, but soon after, in the
    policy's own lines.
    """

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = most_s
        self._lock = Lock()
        self._asker: int | None = None  # the thread that waits for an answer; None: no question is open
        self._asked_at = 0.0
        self._has_raised = False  # in this question; Python may not have got to it yet
        self._watch: Thread | None = None

    def __enter__(self) -> None:
        if self._watch is None:
            self._watch = Thread(target=self._look, name="answers of policies", daemon=True)
            self._watch.start()
        self._asked_at = monotonic()
        self._asker = get_ident()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Note that no question is open: nothing is raised from now on.

        What Python has not got to yet is caught here. It is not taken back: Python 3.11 would then look for it at every
        call for ever, and a profiler would hang.
        """
        while True:
            try:
                with self._lock:
                    has_raised, self._has_raised, self._asker = self._has_raised, False, None
                for _ in range(2 if has_raised else 0):  # Python raises it at the latest where a loop goes back
                    pass
                return
            except NoAnswer:
                continue

    def _look(self) -> None:
        never, wait_s = Event(), self._most_s / 5
        while not never.wait(wait_s):
            with self._lock:
                is_late = self._asker is not None and monotonic() - self._asked_at > self._most_s
                wait_s = 1e-3 if is_late and not self._has_raised else self._most_s / 5
                if self._asker is not None and is_late and not _runs_our_code(self._asker):
                    self._has_raised = True
                    pythonapi.PyThreadState_SetAsyncExc(c_ulong(self._asker), py_object(NoAnswer))


def _runs_our_code(thread: int) -> bool:
    """Return whether the thread is in a line of ours now, or in a line of Python's library that ours has called."""
    frame = sys._current_frames().get(thread)
    while frame is not None and (package := _package_of(frame)) in sys.stdlib_module_names:
        frame = frame.f_back
    return frame is not None and package == "alignedserve"


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
