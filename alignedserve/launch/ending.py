"""The bound on the end of a deployment on Ray: a call to a Ray that has lost its head or a node may never return.

Its thread hears signals too. Python handles a signal between two lines of the main thread, which such a call holds.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from alignedserve.launch.keeper import STOPS, say
from alignedserve.shell.exit_code import ExitCode

END_S = 60.0  # for a deployment to end after its requests have ended
AT_ONCE_S = 5.0  # the same after a second signal
SAID_S = 1.0  # for the last line to be written: a terminal may be paused
_BEGUN = 0  # no signal has this number


class BoundedEnd:
    """Ends this process when the end of its deployment takes too long, and soon after a second signal."""

    def __init__(self, drain_s: float) -> None:
        self._within_s = drain_s + END_S
        self._deadline = math.inf
        self._is_wanted = False  # or the deployment ends by a fault
        self.left: Callable[[], Collection[str]] = tuple  # the parts that have not ended
        self._hears, self._tells = socket.socketpair()
        self._tells.setblocking(False)
        threading.Thread(target=self._watch, name="ending", daemon=True).start()

    def hear_signals(self) -> None:
        """Count the end from the first signal. The process has to handle the signals as well."""
        signal.set_wakeup_fd(self._tells.fileno())

    def drains_for(self, drain_s: float) -> None:
        """Take the time that a drain has from now on; an end that has begun keeps its own."""
        self._within_s = drain_s + END_S

    def begin(self, is_wanted: bool = False) -> None:
        """Count the end from now, unless it has begun."""
        self._is_wanted |= is_wanted
        self._tells.send(bytes([_BEGUN]))

    def _watch(self) -> None:
        while (left_s := self._deadline - time.monotonic()) > 0:
            self._hears.settimeout(None if math.isinf(left_s) else left_s)
            with suppress(TimeoutError):
                self._hear(self._hears.recv(1)[0])
        self._leave()

    def _hear(self, number: int) -> None:
        is_signal, has_begun = number in STOPS, self._deadline < math.inf
        if not is_signal and number != _BEGUN:
            return
        self._is_wanted |= is_signal
        within_s = AT_ONCE_S if is_signal and has_begun else self._within_s
        self._deadline = min(self._deadline, time.monotonic() + within_s)

    def _leave(self) -> None:
        left = ", ".join(sorted(self.left())) or "no part"
        line = f"the end hangs in {_call()}: the launcher ends now, and leaves to Ray what may still run: {left}"
        saying = threading.Thread(target=say, args=[line], daemon=True)
        saying.start()
        saying.join(SAID_S)
        os._exit(ExitCode.STOPPED if self._is_wanted else ExitCode.BROKEN)


def _call() -> str:
    """Return the name of the function in which the main thread is."""
    main = threading.main_thread().ident
    return next(frame.f_code.co_name for thread, frame in sys._current_frames().items() if thread == main)
