"""BROS's packing (§4.2): by promises, at most B_curr requests in a step; real-time ones displace best-effort ones."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.decode_worker.packing.packer import Packer, PackingSetup
from alignedserve.worker.step.limits import Selection
from alignedserve.worker.step.running import Running

FIRST_BATCH = 128  # B_curr to begin with, where the engine takes as many (BROS §4.2)


class GrowingBatch(Packer):
    """B_curr doubles when a choice did not end for lack of time, and returns to its start when it did.

    Best-effort requests run in what real-time ones leave. They leave so that real-time requests find memory: the one
    that has longest to wait leaves first.
    """

    def __init__(self, setup: PackingSetup) -> None:
        super().__init__(setup)
        self._first_batch = self._batch = min(FIRST_BATCH, setup.most)
        self._first_to_leave = setup.first_to_leave

    @property
    def batch(self) -> int:
        return self._batch

    def leaving(self, prompts: Sequence[Running], decodes: Sequence[Running], now: float) -> Running:
        seated = (*prompts, *decodes)
        return self._first_to_leave([seat for seat in seated if not seat.promise.is_rt] or seated, now)

    def planned(self, selection: Selection) -> None:
        self._batch = self._first_batch if selection.ran_out_of_time else min(2 * self._batch, self._most)
