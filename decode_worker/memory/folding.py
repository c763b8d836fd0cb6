"""Fold pairs of decodes that layers with a window or stretches read no more, where other layers read all (core.Fold).

    pairs of a request    [folded] [folded]  [all layers] [all layers] [all layers] ...
    tokens                0 ─── `folded` ──┘ └─ read by all layers ──────── prefix

Nothing is written to the old pairs: what they keep of layers that read all is copied to a free pair, and they are given
back. So other requests that share them read on, they are found as a beginning as long as they are idle, and a step in
flight may still read them. Pairs are folded only where more come free than are taken. Nothing comes free of a beginning
that others read: it is folded where enough comes free of what follows it.

A prompt keeps what it has until its first token, and until the pool has its pages if it is to get them; where memory is
short, that is not awaited. A folded request that has to leave goes to the pool if the pool has all tokens that are
folded, as it mostly has of prompts: only the tokens after these pages are written. If not, it is computed anew, from
what the pool has on.
"""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.core import Fold
from alignedserve.decode_worker.requests.occupancy import Occupancy
from alignedserve.forms.orders import FoldKv
from alignedserve.protocol.commands import Command
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.page_writer import PageWriter
from alignedserve.worker.step.request import WorkerRequest

MOST_FOLDS = 16  # after one step: a long prompt that has just ended delays no decode by the copy of all its pairs


class Folding:
    def __init__(
        self,
        memory: DeviceMemory,
        here: Occupancy,
        writer: PageWriter,
        fold: Fold | None,
    ) -> None:
        self._size, self._here, self._memory, self._writer = memory.limits.block_size, here, memory, writer
        self._fold = fold

    def fold(self, awaits_pool: Callable[[WorkerRequest], bool]) -> list[Command]:
        """Fold what only some layers read of the decodes here, at most MOST_FOLDS pairs after one step.

        `awaits_pool` says whether the pool is to get pages of a request that it has not got yet."""
        if self._fold is None:
            return []
        folds, left, is_short = list[tuple[int, ...]](), tuple[int, ...](), self._is_short
        for running in self._here.residents.values():
            is_wanted = is_short or not awaits_pool(running)
            while len(folds) < MOST_FOLDS and is_wanted and self._is_due(running, self._fold):
                old = self._old_pairs(running, self._fold.pairs)
                if not self._is_worth(running, old, self._fold) or (into := self._memory.blocks.take(1)) is None:
                    break
                self._replace(running, into, self._fold)
                folds.append((*into, *old))
                left += old
        if not folds:
            return []
        self._memory.spare(left)  # only now: a pair that comes free may take what another one keeps
        return [FoldKv(tuple(folds))]

    @property
    def _is_short(self) -> bool:
        """Return whether a prompt waits for memory, or decodes may soon lack some."""
        return self._memory.num_free < len(self._here.residents) or self._here.queue.lacks_memory(only_rt=False)

    def _is_due(self, running: WorkerRequest, fold: Fold) -> bool:
        if fold.foldable(running.prefix, self._size) <= running.kv.folded or running.kv.form:
            return False
        return not (self._writer.is_writing(running) or self._writer.num_written(running))

    def _is_worth(self, running: WorkerRequest, old: tuple[int, ...], fold: Fold) -> bool:
        """Return whether more pairs come free than are taken if these are folded, or else all that may be.

        All are counted for few tokens only, since many may be read by others as long as they are here."""
        num_freed = self._memory.blocks.num_freed
        if num_freed(old) > 1:
            return True
        if running.prefix % self._size:
            return False
        count = (fold.foldable(running.prefix, self._size) - running.kv.folded) // self._size
        taken = count // fold.pairs
        return taken <= self._memory.num_free and num_freed(self._old_pairs(running, count)) > taken

    def _old_pairs(self, running: WorkerRequest, count: int) -> tuple[int, ...]:
        """Return the first `count` pairs of a request that are not folded."""
        at = self._num_folded(running)
        return running.pairs[at : at + count]

    def _num_folded(self, running: WorkerRequest) -> int:
        """Return how many pairs of a request are folded."""
        return (running.kv.folded - running.kv.dropped) // self._size

    def _replace(self, running: WorkerRequest, into: tuple[int, ...], fold: Fold) -> None:
        """Put a folded pair into the place of these."""
        at, kv = self._num_folded(running), running.kv
        pairs, folded = (*kv.pairs[:at], *into, *kv.pairs[at + fold.pairs :]), kv.folded + self._size * fold.pairs
        running.kv = kv._replace(pairs=pairs, dropped=fold.spared(folded), folded=folded)
