"""Ends a custom policy that does not answer, since the part that asked it hangs meanwhile.

    with limit:            a question is open
        policy.key(...)    ◀─ PolicyOverdue, raised by a thread that looks now and then whether it is still the same

Python raises it between two of its own instructions: a policy that waits in code that is not Python is ended when that
code returns. Only the thread that asks enters the limit, for one question at a time. A scheduler calls code of ours,
which may be about to change memory: nothing is raised there, but soon after, in the policy's own lines.
"""

from __future__ import annotations

import sys
from ctypes import c_ulong, py_object, pythonapi
from threading import Event, Lock, Thread, get_ident
from time import monotonic
from types import FrameType

from alignedserve.policies.guard import Limit, PolicyOverdue

MOST_S = 5.0  # for an answer


class AnswerLimit(Limit):
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
            except PolicyOverdue:
                continue

    def _look(self) -> None:
        never, wait_s = Event(), self._most_s / 5
        while not never.wait(wait_s):
            with self._lock:
                is_late = self._asker is not None and monotonic() - self._asked_at > self._most_s
                wait_s = 1e-3 if is_late and not self._has_raised else self._most_s / 5
                if self._asker is not None and is_late and not _runs_our_code(self._asker):
                    self._has_raised = True
                    pythonapi.PyThreadState_SetAsyncExc(c_ulong(self._asker), py_object(PolicyOverdue))


def _runs_our_code(thread: int) -> bool:
    """Return whether the thread is in a line of ours now, or in a line of Python's library that ours has called."""
    frame = sys._current_frames().get(thread)
    while frame is not None and (package := _package_of(frame)) in sys.stdlib_module_names:
        frame = frame.f_back
    return frame is not None and package == "alignedserve"


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
