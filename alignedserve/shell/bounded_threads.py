"""Threads for work on bodies and lines of batches, where one text must not hold up all others for ever.

    work ──▶ a place, of `num` ──▶ a thread ──▶ its result
                     ▲                └─ still not done after its limit: the thread is left behind, its place is free
                     └─────────────────────────┘

Python cannot end a thread. So work that is given up goes on in a thread that nobody waits for. Where MOST_LEFT such
threads still work, the process ends, and starts again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

from alignedserve.errors import AlignedServeError
from alignedserve.signs import ExitCode

log = logging.getLogger("alignedserve.shell")

WORK_S = 60.0  # the longest work of a sound body takes ten seconds, on a machine that is not busy
MOST_LEFT = 8

T = TypeVar("T")


class WorkTooLong(AlignedServeError):
    """Work on what a client sent was given up."""


class BoundedThreads:
    def __init__(self, num: int, name: str, times: int = 1) -> None:
        """Do `num` works at once, and give each up after `times` WORK_S."""
        self._free, self._limit_s = asyncio.Semaphore(num), times * WORK_S
        self._left: list[Event] = []  # each is set when work that was given up has ended
        self._threads = ThreadPoolExecutor(num + MOST_LEFT, thread_name_prefix=name)

    async def do(self, work: Callable[[], T]) -> T:
        """Do the work in a thread. Whoever waits for it may leave: its place is free when it has ended."""
        await self._free.acquire()
        loop, ended = asyncio.get_running_loop(), Event()

        def work_once() -> T:
            try:
                return work()
            finally:
                ended.set()

        working = loop.run_in_executor(self._threads, work_once)  # in the simulator's loop it ends in virtual time
        limit = loop.call_later(self._limit_s, self._give_up, ended, working)
        working.add_done_callback(lambda _: (limit.cancel(), self._free.release()))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            if ended in self._left:  # else this process ends
                raise WorkTooLong(
                    f"the server has worked on this text for {self._limit_s:.0f} s and gives it up"
                ) from None
            raise

    def _give_up(self, ended: Event, working: asyncio.Future[T]) -> None:
        self._left = [*(each for each in self._left if not each.is_set()), ended]
        log.error("work on a text has run for %.0f s: it is given up, and its thread is left behind", self._limit_s)
        if len(self._left) == MOST_LEFT:
            log.error("%d threads that were left behind still work: this process ends, and starts again", MOST_LEFT)
            os._exit(ExitCode.WORK_HUNG)
        working.cancel()
