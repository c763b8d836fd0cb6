"""Copies between the device and the arena that go on beside the steps, in a thread of their own.

One copy after the other, page by page (of a GPU's some at once), each a turn of the `Pace`. It has a copier of its own:
what one keeps to work with is not for two threads. Which arena there is the shell's thread decides; while a page is
copied, it waits. On a GPU copies have a stream of their own, one for all: torch keeps, for each stream, the memory that
they work with. A copy goes behind what was ordered of the device when it was added.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from alignedserve.core import units_for
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device.devices import CPU, Mark, beside_steps
from alignedserve.engine.device.pace import Pace
from alignedserve.kernels.common.threads import compute_alone
from alignedserve.protocol.commands import CopyIn, CopyOut
from alignedserve.protocol.events import CopiedIn, CopiedOut

log = logging.getLogger("alignedserve.engine")

Copy: TypeAlias = CopyIn | CopyOut
Post: TypeAlias = Callable[[CopiedIn | CopiedOut], None]


class AsideCopies:
    def __init__(
        self, page_size: int, pace: Pace, device: torch.device = CPU, failed: Callable[[], None] = lambda: None
    ) -> None:
        """`failed` is called in the thread when a copy has."""
        self._page_size, self._pace, self._device = page_size, pace, device
        self._failed = failed
        self._changed = threading.Condition()
        self._copier: PageCopier | None = None
        self._pool = ""  # its holder
        self._due: deque[tuple[Copy, Post, Mark]] = deque()
        self._thread: threading.Thread | None = None

    def attach(self, copier: PageCopier, pool: str) -> None:
        with self._changed:
            self._copier, self._pool = copier, pool

    def detach(self) -> None:
        """From here on nothing touches that arena; the copies that are not through come to nothing."""
        with self._changed:
            self._copier = None

    def add(self, copy: Copy, post: Post) -> None:
        with self._changed:
            self._due.append((copy, post, Mark(self._device)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="aside", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        compute_alone()
        with beside_steps(self._device):
            while True:
                self._go_on_with(*self._next())

    def _next(self) -> tuple[Copy, Post, Mark]:
        with self._changed:
            while not self._due:
                self._changed.wait()
            return self._due.popleft()

    def _go_on_with(self, copy: Copy, post: Post, ordered: Mark) -> None:
        try:
            ordered.go_behind()
            intact = self._perform(copy)
        except Exception:  # a plan that cannot be: the thread lives on, and nothing of it is used
            log.exception("copy %d", copy.number)
            self._failed()
            intact = False
        post(CopiedIn(copy.number, intact) if isinstance(copy, CopyIn) else CopiedOut(copy.number))

    def _perform(self, copy: Copy) -> bool:
        with self._changed:
            if self._copier is None or self._pool != copy.pool:
                return False
            copier = self._copier
        turns, start = _turns(copier, copy)
        for _ in range(copier.num_turns(units_for(len(copy.tokens) - start, self._page_size))):
            with self._pace.turn(), self._changed:
                if self._copier is not copier or not next(turns):
                    return False
        return True


def _turns(copier: PageCopier, copy: Copy) -> tuple[Iterator[bool], int]:
    """Each when it is asked for, and the first token of the first."""
    if isinstance(copy, CopyIn):
        return copier.pages_in(copy.pages, copy.pairs, copy.tokens, kind=copy.kind), 0
    return copier.pages_out(copy.pairs, copy.pages, copy.tokens, copy.start), copy.start
