"""Ctrl-C while modules are imported: nothing is begun that wants an order, and a traceback would show only us."""

import os
import signal

INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended


class LeavesAtOnce:
    """Ctrl-C within ends the process, without a word. Where it means something else already, it goes on to."""

    def __enter__(self) -> None:
        self._changes = end_at_once()

    def __exit__(self, *_: object) -> None:
        if self._changes:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once() -> bool:
    """From now on, where Ctrl-C would raise KeyboardInterrupt: whether it would."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    try:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    except ValueError:  # not in the main thread, which alone hears signals
        return False
    return True
