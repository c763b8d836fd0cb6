"""AlignedServe's packing (§3.4, case 3): the longest request leaves for lack of memory."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.decode_worker.packing.packer import Packer, PackingSetup
from alignedserve.worker.step.running import Running


class LongestLeaves(Packer):
    """Requests run by arrival; the longest leaves. While a batch replaces another, the longest of the old one leaves.

    That frees the most memory, and the old batch ends sooner.
    """

    def __init__(self, setup: PackingSetup) -> None:
        super().__init__(setup)
        self._running = setup.batch

    def leaving(self, prompts: Sequence[Running], decodes: Sequence[Running], now: float) -> Running:
        return max(self._running.old_of((*prompts, *decodes)), key=lambda request: request.num_tokens)
