"""Bounds on what Ray does not answer: on each call to it, and on the end of a deployment.

A call to a Ray that has lost its head or a node may never return, and holds the thread that makes it. Python handles a
signal between two lines of the main thread: while such a call holds that thread, another one hears signals.
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
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from typing import Any, TypeVar

from alignedserve.launch.host import NoAnswer, say
from alignedserve.signs import ExitCode

STOPS = (signal.SIGINT, signal.SIGTERM)
CALL_S = 20.0  # for a call to Ray
END_S = 60.0  # for a deployment to end after its requests have ended
AT_ONCE_S = 5.0  # the same after a second signal
SAID_S = 1.0  # for the last line to be written: a terminal may be paused
_BEGUN = 0  # no signal has this number

Result = TypeVar("Result")


class BoundedCalls:
    """Makes one call after the other, each in a thread of its own. A call that is late goes on there."""

    def __init__(self, whom: str, most_s: float = CALL_S) -> None:
        self._whom, self._most_s = whom, most_s
        self._late: Future[Any] | None = None

    def within(self, call: Callable[[], Result]) -> Result:
        """Return what the call returns; raise NoAnswer where it is late, and at once while an earlier one is."""
        if self._late is not None and not self._late.done():
            raise NoAnswer(f"{self._whom} still does not answer")
        answer: Future[Result] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="bounded-call", daemon=True).start()
        try:
            return answer.result(self._most_s)
        except Late:
            if answer.done():  # just now, or the call itself has failed so
                return answer.result()
            self._late = answer
            raise NoAnswer(f"{self._whom} has not answered for {self._most_s:g} s") from None


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
