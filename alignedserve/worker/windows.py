"""KV that layers with windows no longer read: given back where all layers have windows, folded where some read all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from alignedserve.core import Fold, FoldKv, WorkerLimits
from alignedserve.protocol.commands import Command
from alignedserve.worker.pool import PageWriter
from alignedserve.worker.requests import Requests
from alignedserve.worker.step.blocks import Blocks, drop_beginning, fold_blocks, num_folded
from alignedserve.worker.step.request import WorkerRequest


class DeviceMemory(Protocol):
    """What is needed of the memory that has a Dropping and a Folding (memory.py)."""

    limits: WorkerLimits
    blocks: Blocks

    @property
    def num_free(self) -> int: ...

    def release_unused(self, blocks: tuple[int, ...]) -> None: ...

    def take(self, count: int) -> tuple[int, ...] | None: ...


class Dropping:
    """Frees KV that no layer reads any more, of requests that still run, where all layers have windows.

        tokens     0 ·············· dropped ─────────────────────── prefix
        KV         given back       in `blocks`, read by what comes   ▲ the next token: it reads the last `reach` tokens

    A request drops whole pages of the pool, so that the rest may go there as it is. From then on the request is not
    found by its beginning: the pool forgets the pages that it kept for the request, and gets the last tokens without
    names.
    """

    def __init__(self, memory: DeviceMemory, writer: PageWriter) -> None:
        self._memory, self._writer = memory, writer
        self._unread = memory.limits.unread
        self.is_on = memory.limits.reach is not None

    def drop(self, running: WorkerRequest) -> bool:
        """Free blocks that a request no longer needs; free none while its pages are being written.

        Return whether the pool need not keep pages for the request any more."""
        return not self._writer.is_writing(running) and self.drop_to_leave(running, self._memory.release_unused)

    def drop_to_leave(self, running: WorkerRequest, free: Callable[[tuple[int, ...]], None]) -> bool:
        """Do the same for a request that leaves, even while its pages are being written: for all its blocks the device
        might never have room again. `free` gets the blocks."""
        unread = self._unread(running.prefix)
        if not unread or running.kv.form:
            return False
        if unread > running.kv.dropped:
            self._writer.forget_parts(running)
            free(drop_beginning(running, unread, self._memory.limits.block_size))
            running.drop_names()
        is_known = bool(running.known)  # a request seated on blocks of the device may lack its beginning already
        if is_known:
            running.forget_known()
        return is_known


MOST_FOLDS = 16  # after one step: a long prompt that has just ended delays no decode by the copy of all its blocks


class Folding:
    """Folds blocks of decodes that layers with a window or stretches no longer read, where others read all (core.Fold).

        blocks of a request   [folded] [folded]  [all layers] [all layers] [all layers] ...
        tokens                0 ─── `folded` ──┘ └─ read by all layers ──────── prefix

    Nothing is written to the old blocks: what the layers that read all keep there is copied to a free block, and the
    old blocks are given back. So other requests that share the old blocks read on, new requests find them while they
    are idle, and a step in flight may still read them. Blocks are folded only where more blocks come free than are
    taken. Blocks that other requests read do not come free: these are folded if enough blocks behind them come free.

    A prompt keeps its blocks until the first token, and, unless memory is short, until the pool has all pages of the
    prompt that are to go there. A folded request that has to leave goes to the pool if the pool has all folded tokens,
    as is usual for prompts: only the tokens after these pages are written. Otherwise the request is recomputed, from
    what the pool has on.
    """

    def __init__(self, memory: DeviceMemory, here: Requests, writer: PageWriter, fold: Fold | None) -> None:
        self._size, self._here, self._memory, self._writer = memory.limits.block_size, here, memory, writer
        self._fold = fold

    def trim(self, awaits_pool: Callable[[WorkerRequest], bool], lacks_memory: Callable[[], bool]) -> list[Command]:
        """Fold blocks of the decodes here, at most MOST_FOLDS blocks after one step; return the command for that.

        `awaits_pool` says whether pages of a request are still to be copied to the pool, `lacks_memory` whether a
        prompt waits for memory."""
        if self._fold is None:
            return []
        folds, left = list[tuple[int, ...]](), tuple[int, ...]()
        is_short = self._memory.num_free < len(self._here.residents) or lacks_memory()  # or decodes may soon lack some
        for running in self._here.residents.values():
            is_wanted = is_short or not awaits_pool(running)
            while len(folds) < MOST_FOLDS and is_wanted and self._is_due(running, self._fold):
                old = self._old_blocks(running, self._fold.blocks)
                if not self._is_worth(running, old, self._fold) or (into := self._memory.take(1)) is None:
                    break
                fold_blocks(running, into, self._fold, self._size)
                folds.append((*into, *old))
                left += old
        if not folds:
            return []
        # Only now: else a fold of this list could write to a block that another fold reads.
        self._memory.release_unused(left)
        return [FoldKv(tuple(folds))]

    def _is_due(self, running: WorkerRequest, fold: Fold) -> bool:
        if fold.foldable(running.prefix, self._size) <= running.kv.folded or running.kv.form:
            return False
        return not (self._writer.is_writing(running) or self._writer.num_written(running))

    def _is_worth(self, running: WorkerRequest, old: tuple[int, ...], fold: Fold) -> bool:
        """Return whether folding these blocks, or else all that may be folded, frees more blocks than folding takes.

        All are counted only when a block has become full: while other requests read many of them, a count at each token
        would be in vain."""
        num_freed = self._memory.blocks.num_freed
        if num_freed(old) > 1:
            return True
        if running.prefix % self._size:
            return False
        count = (fold.foldable(running.prefix, self._size) - running.kv.folded) // self._size
        taken = count // fold.blocks
        return taken <= self._memory.num_free and num_freed(self._old_blocks(running, count)) > taken

    def _old_blocks(self, running: WorkerRequest, count: int) -> tuple[int, ...]:
        """Return the first `count` blocks of a request that are not folded."""
        at = num_folded(running.kv, self._size)
        return running.blocks[at : at + count]
