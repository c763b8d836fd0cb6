"""Performs the orders of forms on a worker's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from torch import Tensor

from alignedserve.core import FoldKv, FormOrder
from alignedserve.forms.device.checkpoints import Checkpoints
from alignedserve.forms.device.hidden import HiddenVectors
from alignedserve.forms.device.pages import Amend
from alignedserve.forms.orders import CompressPage, CopySlots
from alignedserve.protocol.events import Event, PageCompressed


class FormHands:
    def __init__(
        self,
        form: Callable[[], HiddenVectors],
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
