"""What a worker's shell does for its core: steps on the engine, copies between device and arena."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from alignedserve.core import Role
from alignedserve.engine.copies import PageCopier
from alignedserve.engine.engine import Engine
from alignedserve.errors import ArenaError
from alignedserve.kvpool.arena import Arena, HolderLock
from alignedserve.messages import Command, CopiedIn, CopiedOut, CopyIn, CopyOut, Event, Member, RunStep, StepDone

log = logging.getLogger("alignedserve.engine")


class EngineHands:
    def __init__(self, engine: Engine, arena_path: Path, page_size: int, verify: bool) -> None:
        self._engine = engine
        self._arena_path = arena_path
        self._page_size, self._verify = page_size, verify
        self._copier: PageCopier | None = None  # to the arena of the pool that is there, if one is

    def meet(self, member: Member) -> None:
        """A pool: map its arena. The mapping of an earlier one goes with its last reference."""
        if member.role is not Role.POOL:
            return
        try:
            arena = Arena.attach(self._arena_path, incarnation=member.incarnation)
            self._copier = PageCopier(self._engine.cache, arena, self._page_size, self._verify)
        except ArenaError as error:
            self._copier = None  # the pool has gone again; its successor will be met
            log.warning("%s", error)

    def perform(self, command: Command) -> Event | None:
        match command:
            case RunStep(plan):
                return StepDone(self._engine.step(plan))
            case CopyOut(request, pairs, pages, tokens):
                if self._copier is not None:
                    self._copier.copy_out(pairs, pages, tokens)
                return CopiedOut(request)
            case CopyIn(request, pages, pairs, tokens):
                intact = self._copier is not None and self._copier.copy_in(pages, pairs, tokens)
                return CopiedIn(request, intact)
        raise TypeError(f"a worker cannot perform {command}")


def hold_leases(directory: Path, deployment: str, member: Member) -> HolderLock:
    """The lock by which others see that this process lives, and may still write to its leased pages."""
    return HolderLock(directory, f"{deployment}-{member.holder}")


def use_threads(threads: int | None, workers: int) -> None:
    """Compute threads of this worker: its share of the cores, less one where the gateway shares them."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads or max(1, (cores - 1) // workers))
