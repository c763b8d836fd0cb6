"""Copies vectors of single tokens from slot to slot of the device cache, and to the worker's own memory and back.

That memory belongs to this process and ends with it. No other process reads the memory, so a place has no header. The
memory is laid out like the device cache, so that the same kernels gather from both and scatter to both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alignedserve.core import units_for
from alignedserve.engine.device import large_pages
from alignedserve.errors import PlanError
from alignedserve.forms.orders import CopySlots
from alignedserve.kernels.dispatch.dispatcher import choose


class Checkpoints:
    """The checkpoints of one worker: vectors of single tokens outside the device cache."""

    def __init__(self, cache: Tensor, num_places: int) -> None:
        """Make room for `num_places` tokens; memory is taken only once it is written."""
        layers, halves, self._block_size, kv_dim = cache.shape
        self._cache, self._num_slots, self._num_places = cache, halves // 2 * self._block_size, num_places
        blocks = max(1, units_for(num_places, self._block_size))
        self._store = large_pages.zeros((layers, 2 * blocks, self._block_size, kv_dim), cache.dtype)
        self._kernels = {memory.device: choose(memory.device, memory.dtype).kernels for memory in (cache, self._store)}

    def copy(self, command: CopySlots) -> None:
        """Copy checkpoints, moves and restores; all are read before any is written."""
        saved = self._gathered(self._cache, [slot for slot, _ in command.checkpoints], self._num_slots)
        moved = self._gathered(self._cache, [slot for slot, _ in command.moves], self._num_slots)
        restored = self._gathered(self._store, [place for place, _ in command.restores], self._num_places)
        self._scatter(self._store, [place for _, place in command.checkpoints], self._num_places, saved)
        self._scatter(self._cache, [slot for _, slot in command.moves], self._num_slots, moved)
        self._scatter(self._cache, [slot for _, slot in command.restores], self._num_slots, restored)

    def read(self, places: Sequence[int]) -> Tensor:
        """Return what the places hold: [layers, 2, tokens, kv_dim]."""
        return self._gathered(self._store, places, self._num_places)

    def _gathered(self, memory: Tensor, numbers: Sequence[int], end: int) -> Tensor:
        rows = memory.new_empty((len(memory), 2, len(numbers), memory.shape[-1]))
        if numbers:
            self._kernels[memory.device].gather(memory, self._slots(numbers, end), rows)
        return rows

    def _scatter(self, memory: Tensor, numbers: Sequence[int], end: int, rows: Tensor) -> None:
        if numbers:
            self._kernels[memory.device].scatter(memory, self._slots(numbers, end), rows.to(memory.device))

    def _slots(self, numbers: Sequence[int], end: int) -> Tensor:
        """Return the slots of K, as kernels/common/reference.py numbers them."""
        if not all(0 <= number < end for number in numbers):
            raise PlanError(f"a copy names a slot or a place outside 0..{end - 1}")
        wide = torch.tensor(numbers, dtype=torch.long)
        within = wide % self._block_size
        return 2 * (wide - within) + within
