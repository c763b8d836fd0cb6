"""The event loop of asyncio: uvloop's where that is installed, which is faster. A loop that stands still is ended."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import traceback
from collections.abc import Coroutine
from typing import Any

from alignedserve.fallbacks import fell_back
from alignedserve.shell.exit_code import ExitCode

log = logging.getLogger("alignedserve.shell")

STILL_S = 30.0  # that an event loop may stand still
_LOOKS = 6  # in that time


def run_loop(main: Coroutine[Any, Any, None], still_s: float = STILL_S) -> None:
    """Run the coroutine to its end; end the process if its event loop stands still for so long."""
    try:
        import uvloop
    except ImportError as error:
        fell_back("uvloop", f"it cannot be imported: {error}", "asyncio's own event loop runs, which is slower")
        asyncio.run(_watched(main, still_s))
    else:
        uvloop.run(_watched(main, still_s))


async def _watched(main: Coroutine[Any, Any, None], still_s: float) -> None:
    watch = _LoopWatch(still_s)
    try:
        await main
    finally:
        watch.stop()


class _LoopWatch:
    """Ends the process when its event loop stands still, so that it starts again.

    Nobody else would: heartbeats have a thread of their own, so that a loop that is busy for a moment is not taken for
    dead. This thread counts how often it has looked, not the time: a process that was suspended has not stood still.
    """

    def __init__(self, still_s: float) -> None:
        self._still_s, self._loop, self._loop_thread = still_s, asyncio.get_running_loop(), threading.get_ident()
        self._has_turned, self._has_ended = True, threading.Event()
        self._turn()
        threading.Thread(target=self._look, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._has_ended.set()
        self._timer.cancel()

    def _turn(self) -> None:
        self._has_turned = True
        self._timer = self._loop.call_later(self._still_s / _LOOKS / 2, self._turn)

    def _look(self) -> None:
        num_still = 0
        while not self._has_ended.wait(self._still_s / _LOOKS):
            num_still = 0 if self._has_turned else num_still + 1
            self._has_turned = False
            if num_still >= _LOOKS:
                self._end()

    def _end(self) -> None:
        at = traceback.extract_stack(sys._current_frames()[self._loop_thread])[-1]
        place = f"{at.filename}:{at.lineno} ({at.name})"
        log.error(
            "the event loop has stood still for %.0f s, at %s: this process ends, and starts again",
            self._still_s,
            place,
        )
        faulthandler.dump_traceback()
        os._exit(ExitCode.BROKEN)
