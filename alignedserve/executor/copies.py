"""The copies of a worker: between its device and the arena of the present pool, and within its device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from alignedserve.core import FormOrder
from alignedserve.engine.copying.aside import AsideCopies, Watch, unwatched
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device.devices import out_of_memory
from alignedserve.engine.device.pace import CopyPace
from alignedserve.engine.device.pinning import Cudart, Pinner
from alignedserve.engine.engine import Engine
from alignedserve.engine.forms.performing import FormHands
from alignedserve.errors import ArenaError
from alignedserve.kernels.common.failing import loss
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.protocol.commands import CopyIn, CopyOut
from alignedserve.protocol.events import CopiedIn, CopiedOut, Event, Post
from alignedserve.protocol.messages import Member
from alignedserve.protocol.rank_orders import Copying
from alignedserve.signs import ExitCode

log = logging.getLogger("alignedserve.engine")


class PoolCopies:
    """Copies on behalf of one rank. Without a pool nothing is copied, and the results say so."""

    def __init__(
        self,
        engine: Engine,
        arena_path: Path,
        page_size: int,
        verify: bool,
        cudart: Cudart | None,
        pace: CopyPace,
        num_on_host: int,
        watch: Watch = unwatched,
    ) -> None:
        """Pin the arena where there is a `cudart`; have room on the host for `num_on_host` tokens; `watch` each piece
        of a copy beside the steps."""
        self._engine, self._cudart = engine, cudart
        self._arena_path, self._page_size, self._verify = arena_path, page_size, verify
        self._aside = AsideCopies(page_size, pace, engine.device, partial(end_where_lost, engine.device), watch)
        self._forms = FormHands(lambda: engine.form, engine.cache, num_on_host, engine.fold, self._rewrite)
        self._copier: PageCopier | None = None  # of the present pool's arena
        self._pool = ""  # the holder of that arena
        self._pinner: Pinner | None = None  # of that arena

    def attach(self, pool: Member) -> None:
        """Map the arena of this pool, and begin to pin it."""
        try:
            arena = Arena.attach(self._arena_path, incarnation=pool.incarnation)
            self._copier, self._pool = self._copier_of(arena), pool.holder
            is_pinned = self._cudart is not None  # which maps it, too
            self._aside.attach(self._copier_of(arena), self._pool, None if is_pinned else arena.map_ahead)
            if self._cudart is not None:
                self._pinner = Pinner(arena, self._cudart, self._engine.device)
        except ArenaError as error:
            log.warning("%s", error)  # the pool has gone again; its successor will be met

    def detach(self) -> None:
        """Unmap the arena: its memory is free once no process maps it, and the next pool may need that memory."""
        if self._copier is not None:
            self._aside.detach()
            if self._pinner is not None:
                self._pinner.unpin()
                self._pinner = None
            self._copier.close()
            self._copier = None

    def close(self) -> None:
        """Begin no other copy, and end the threads that copy beside the steps and pin the arena."""
        self._aside.close()
        if self._pinner is not None:
            self._pinner.stop()

    def begin_aside(self, command: Copying, post: Post) -> bool:
        """Begin a copy beside the steps; False: it is for between two steps, as all are of several ranks, which would
        do the same work in different orders."""
        copy = self._forms.beside(command) if isinstance(command, FormOrder) else command if command.aside else None
        if copy is None or self._engine.ranks.size > 1:
            return False
        self._aside.add(copy, post)
        return True

    def perform(self, command: Copying) -> Event | None:
        """Perform the copy and return its result. A read counts only if every rank could read its own part."""
        match command:
            case CopyOut(number):
                self._has_room(lambda: self._copy_out(command))
                return CopiedOut(number)
            case FormOrder():
                return self._forms.perform(command)
            case CopyIn(number):
                intact = self._has_room(lambda: self._copy_in(command))
                return CopiedIn(number, self._engine.ranks.agree(intact))

    def _has_room(self, copy: Callable[[], bool]) -> bool:
        """Return what the copy says; False where memory is too little: then nobody takes its pages for whole."""
        try:
            return copy()
        except (MemoryError, RuntimeError) as error:
            if (why := out_of_memory(error)) is None:
                raise
        log.warning("too little memory for a copy, which counts as not done: %s", why)
        return False

    def _copy_out(self, command: CopyOut) -> bool:
        if (copier := self._copier_to(command.pool)) is not None:
            amend = self._forms.amend(command.number)
            copier.copy_out(command.blocks, command.pages, command.tokens, command.start, amend)
        return copier is not None

    def _copy_in(self, command: CopyIn) -> bool:
        copier = self._copier_to(command.pool)
        if copier is None:
            return False
        return copier.copy_in(command.pages, command.blocks, command.tokens, command.start)

    def _rewrite(self, pool: str, page: int, into: int) -> bool:
        copier = self._copier_to(pool)
        return self._engine.ranks.agree(copier is not None and self._has_room(lambda: copier.rewrite(page, into)))

    def _copier_of(self, arena: Arena) -> PageCopier:
        return PageCopier(self._engine.cache, arena, self._page_size, self._verify)

    def _copier_to(self, pool: str) -> PageCopier | None:
        """Return the copier to this pool's arena, or None where that pool has gone: the same pages of its successor
        belong to other requests."""
        return self._copier if pool == self._pool else None


def end_where_lost(device: torch.device) -> None:
    """End the process if the device is lost, since nothing that it could do is of any use. A thread that has failed
    calls this; the main thread raises DeviceLost instead."""
    if why := loss(device):
        log.error("%s computes nothing any more (%s): this process ends, and is restarted", device, why)
        os._exit(ExitCode.DEVICE_LOST)
