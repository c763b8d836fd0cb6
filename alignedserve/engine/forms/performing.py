"""Performs the orders of forms on a worker's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from alignedserve.core import FoldKv, FormOrder, units_for
from alignedserve.engine.device import large_pages
from alignedserve.engine.device.devices import CPU
from alignedserve.engine.forms.int8_pages import Amend
from alignedserve.engine.forms.other import OtherForm
from alignedserve.errors import PlanError
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.protocol.events import Event, PageCompressed
from alignedserve.protocol.form_orders import CompressPage, CopySlots


class Rewriter(Protocol):
    """What copies pages of a pool's arena (engine/copying/copies.py)."""

    def rewrite(self, page: int, into: int) -> bool: ...


@dataclass(frozen=True)
class OneTurn:
    """An order beside the steps: its work, and the event of its end by whether the work was done."""

    number: int
    pool: str
    work: Callable[[Rewriter], bool]
    ended: Callable[[bool], Event]


class FormHands:
    def __init__(
        self,
        form: Callable[[], OtherForm],
        cache: Tensor,
        num_on_host: int,
        fold: Callable[[Sequence[Sequence[int]]], None],
        rewrite: Callable[[str, int, int], bool],
    ) -> None:
        """`form` returns the form of the engine with this cache; `num_on_host` tokens have a place on the host.

        `fold` folds blocks of the cache. `rewrite` copies a page of a pool to another page in its form, and
        returns False where it could not."""
        self._form, self._cache, self._fold, self._rewrite = form, cache, fold, rewrite
        self._checkpoints = Checkpoints(cache, num_on_host)
        self._saved: dict[int, tuple[tuple[int, int], ...]] = {}  # (token, place) by the number of a copy that follows

    def perform(self, order: FormOrder) -> Event | None:
        match order:
            case CompressPage(number, pool, page, into):
                began = perf_counter()
                return PageCompressed(pool, number, self._rewrite(pool, page, into), perf_counter() - began)
            case FoldKv(folds):
                self._fold(folds)
            case CopySlots():
                self._checkpoints.copy(order)
                if order.saved:
                    self._saved[order.copy] = order.saved
            case _:
                self._form().perform(order, self._cache)
        return None

    def beside(self, order: FormOrder) -> OneTurn | None:
        """Return the work of an order that goes on beside the steps, None for one between two steps. A CPU would
        compress a page with the cores of a step."""
        if not isinstance(order, CompressPage) or self._cache.device == CPU:
            return None
        number, pool = order.number, order.pool
        return OneTurn(
            *(number, pool, lambda copier: copier.rewrite(order.page, order.into)),
            lambda done: PageCompressed(pool, number, done),
        )

    def amend(self, copy: int) -> Amend | None:
        """Return what is to be written to the pages of a copy beside what the device has; once."""
        saved = self._saved.pop(copy, None)
        if saved is None:
            return None
        vectors, places = self._checkpoints.read([place for _, place in saved]), [token for token, _ in saved]

        def amend(rows: Tensor, tokens: range) -> bool:
            found = [(at, token - tokens.start) for at, token in enumerate(places) if token in tokens]
            for at, row in found:
                rows[:, :, row] = vectors[:, :, at]
            return bool(found)

        return amend


class Checkpoints:
    """The checkpoints of one worker: vectors of single tokens, copied from the device cache to the worker's own memory
    and back.

    That memory belongs to this process and ends with it. No other process reads the memory, so a place has no
    header. The memory is laid out like the device cache, so that the same kernels gather from both and scatter to
    both.
    """

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
