"""Copies between the device and the arena beside the steps, in a thread of their own.

The thread does one copy after the other, page by page (some pages at once on a GPU); each page is a turn of the `Pace`.
It has its own copier: a copier's working memory is not for two threads. The shell's thread attaches and detaches the
arena, and waits while a page is copied. On a GPU all these copies share one stream of their own, since torch keeps
working memory for each stream. A copy goes behind everything that was ordered of the device when the copy was added.
An order of a form of KV may be one turn of the same thread.

While no step runs and nothing is to be copied, the thread has the system map the arena, so that copies need not wait
for that.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

from alignedserve.core import units_for
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device.devices import CPU, Mark, beside_steps
from alignedserve.engine.device.pace import CopyPace
from alignedserve.engine.forms.performing import OneTurn
from alignedserve.kernels.common.threads import compute_alone
from alignedserve.protocol.commands import CopyIn, CopyOut
from alignedserve.protocol.events import CopiedIn, CopiedOut, Event

log = logging.getLogger("alignedserve.engine")


Copy: TypeAlias = CopyIn | CopyOut | OneTurn
Post: TypeAlias = Callable[[Event], None]
MapAhead: TypeAlias = Callable[[int], int | None]  # maps some memory from a place on, and returns where to go on
Watch: TypeAlias = Callable[[str], AbstractContextManager[None]]  # over a piece of a copy

_MAPS_AGAIN_S, _LOOKS_AGAIN_S = 0.005, 0.1  # after a piece of the arena; after steps that ran


def unwatched(_: str) -> AbstractContextManager[None]:
    return nullcontext()


class AsideCopies:
    """The copies of one worker that go on beside its steps."""

    def __init__(
        self,
        page_size: int,
        pace: CopyPace,
        device: torch.device = CPU,
        failed: Callable[[], None] = lambda: None,
        watch: Watch = unwatched,
    ) -> None:
        """`failed` is called in the copying thread when a copy has failed, and `watch` for each piece of a copy."""
        self._page_size, self._pace, self._device = page_size, pace, device
        self._failed, self._watch = failed, watch
        self._changed = threading.Condition()
        self._touching = threading.Lock()  # held by who copies a page; `add` must not wait for that
        self._copier: PageCopier | None = None
        self._pool = ""  # the pool that holds the copier's arena
        self._map_ahead: MapAhead | None = None
        self._mapped_to: int | None = None  # None: nothing is left to be mapped
        self._due: deque[tuple[Copy, Post, Mark]] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def attach(self, copier: PageCopier, pool: str, map_ahead: MapAhead | None = None) -> None:
        """Use this copier for copies to and from the pool's arena, which `map_ahead` maps piece by piece."""
        with self._touching, self._changed:
            self._copier, self._pool = copier, pool
            self._map_ahead, self._mapped_to = map_ahead, None if map_ahead is None else 0
            if map_ahead is not None:
                self._begin()

    def detach(self) -> None:
        """Stop touching the arena when this returns; copies that are not finished fail."""
        with self._touching, self._changed:
            self._copier = self._map_ahead = None

    def add(self, copy: Copy, post: Post) -> None:
        """Queue a copy; `post` receives the event of its end."""
        with self._changed:
            self._due.append((copy, post, Mark(self._device)))
            self._begin()

    def close(self) -> None:
        """End the thread before its next page; of copies that are not finished nothing is posted.

        At its end Python ends the other threads where they next ask for its lock: inside a torch call, that aborts the
        process.
        """
        with self._changed:
            self._is_closed, self._copier = True, None
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aside", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        compute_alone()
        with beside_steps(self._device):
            while (added := self._next()) is not None:
                self._perform_and_post(*added)

    def _next(self) -> tuple[Copy, Post, Mark] | None:
        """Wait for a copy and return it; None once this is closed."""
        with self._changed:
            while not (self._due or self._is_closed):
                self._changed.wait(self._map_more())
            return None if self._is_closed else self._due.popleft()

    def _map_more(self) -> float | None:
        """Map a piece of the arena if no step runs; return when to look again, None where nothing is left."""
        if self._map_ahead is None or self._mapped_to is None:
            return None
        if not self._pace.is_idle:
            return _LOOKS_AGAIN_S
        self._mapped_to = self._map_ahead(self._mapped_to)
        return _MAPS_AGAIN_S

    def _perform_and_post(self, copy: Copy, post: Post, ordered: Mark) -> None:
        try:
            ordered.go_behind()
            intact = self._perform(copy)
        except BaseException:  # an impossible plan, or a panic in Rust: the thread lives on without this copy
            log.exception("copy %d has failed", copy.number)
            self._failed()
            intact = False
        if self._is_closed:
            return
        post(_ended(copy, intact))

    def _perform(self, copy: Copy) -> bool:
        with self._changed:
            if self._copier is None or self._pool != copy.pool:
                return False
            copier = self._copier
        what = f"copy {copy.number} beside the steps"
        with self._watch(what):
            turns, num_turns = _turns(copier, copy, self._page_size)
        for _ in range(num_turns):
            with self._watch(what), self._pace.turn(), self._touching:
                if self._copier is not copier or not next(turns):
                    return False
        return True


def _turns(copier: PageCopier, copy: Copy, page_size: int) -> tuple[Iterator[bool], int]:
    """Return the copy's turns, each done when it is asked for, and how many there are."""
    if isinstance(copy, OneTurn):
        return (work(copier) for work in (copy.work,)), 1
    tokens, start = copy.tokens, copy.start
    num_turns = copier.num_turns(units_for(len(tokens) - start, page_size))
    if isinstance(copy, CopyIn):
        return copier.pages_in(copy.pages, copy.blocks, tokens, start), num_turns
    return copier.pages_out(copy.blocks, copy.pages, tokens, start), num_turns


def _ended(copy: Copy, intact: bool) -> Event:
    if isinstance(copy, OneTurn):
        return copy.ended(intact)
    return CopiedIn(copy.number, intact) if isinstance(copy, CopyIn) else CopiedOut(copy.number)
