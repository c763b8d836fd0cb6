"""Performs the orders of forms on a worker's engine."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from alignedserve.engine.copying.copies import Amend
from alignedserve.forms.device.checkpoints import Checkpoints
from alignedserve.forms.device.table import DeviceForm
from alignedserve.forms.orders import CopySlots, FormOrder


class FormHands:
    def __init__(self, form: Callable[[], DeviceForm], cache: Tensor, num_on_host: int) -> None:
        """`form` returns the form of the engine with this cache; `num_on_host` tokens have a place on the host."""
        self._form, self._cache = form, cache
        self._checkpoints = Checkpoints(cache, num_on_host)
        self._saved: dict[int, tuple[tuple[int, int], ...]] = {}  # (token, place) by the number of a copy that follows

    def perform(self, order: FormOrder) -> None:
        if not isinstance(order, CopySlots):
            self._form().perform(order, self._cache)
            return
        self._checkpoints.copy(order)
        if order.saved:
            self._saved[order.copy] = order.saved

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
