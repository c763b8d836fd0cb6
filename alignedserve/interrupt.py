"""Ends the process at Ctrl-C while modules are imported: no work has begun, and a traceback would only show imports.

A launcher, which has begun to work while it imports, remembers Ctrl-C: one may come where Python drops it.
"""

import os
import signal
from contextlib import suppress
from typing import NoReturn

INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended


def hear_sigterm_as_ctrl_c() -> None:
    """Let SIGTERM end a long command as Ctrl-C does: with what it has found until then."""
    with suppress(ValueError):  # not in the main thread, which alone hears signals
        signal.signal(signal.SIGTERM, signal.default_int_handler)


class LeavesAtOnce:
    """Ends the process silently at Ctrl-C within the block, unless Ctrl-C already has another meaning."""

    def __enter__(self) -> None:
        self._changes = end_at_once()

    def __exit__(self, *_: object) -> None:
        if self._changes:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once() -> bool:
    """End the process at Ctrl-C from now on, where Ctrl-C would raise KeyboardInterrupt; return whether it would."""
    now = signal.getsignal(signal.SIGINT)
    if now is not signal.default_int_handler and not isinstance(now, RemembersCtrlC):
        return False
    try:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    except ValueError:  # not in the main thread, which alone hears signals
        return False
    return True


class RemembersCtrlC:
    """A handler that raises KeyboardInterrupt as Python's own does, and remembers it: Python drops an exception in
    `__del__` and in the callback of a weak reference, and each import has one."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, *_: object) -> NoReturn:
        self.has_come = True
        raise KeyboardInterrupt


def remember_ctrl_c() -> None:
    """Remember Ctrl-C from now on, where it would raise KeyboardInterrupt: whoever handles it next asks for it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # not in the main thread, which alone hears signals
            signal.signal(signal.SIGINT, RemembersCtrlC())
