"""Apt-Serve's packing (§5): every request that has memory runs; before each step it is chosen which requests have it.

Where prompts are not cut, a step runs either prompts or decodes: those that have been pending longer in all.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.decode_worker.packing.packer import MemoryGiver, Packer, PackingSetup, Runnable
from alignedserve.protocol.commands import Command
from alignedserve.scheduling.policy import Chunking
from alignedserve.worker.step.running import Running


class Knapsack(Packer):
    """Requests get memory by what they are worth for the memory that they take (memory/worth.py)."""

    def __init__(self, setup: PackingSetup) -> None:
        super().__init__(setup)
        self._has_types = setup.policy.chunking is Chunking.NONE  # a step runs prompts or decodes
        self._is_prefill = True

    def has_seat(self, num_seated: int) -> bool:
        return False  # no prompt is seated as it comes

    def prepare(self, room: MemoryGiver, now: float) -> list[Command]:
        return room.assign(self, now)

    def choose(self, prompts_s: float, decodes_s: float) -> None:
        """Choose the type of the next step, by how long prompts and decodes have been pending."""
        self._is_prefill = prompts_s >= decodes_s

    @property
    def takes_prompts(self) -> bool:
        """Return whether prompts may be seated for the next step."""
        return self._is_prefill or not self._has_types

    def runnable(self, decodes: Sequence[Running], prompts: Sequence[Running]) -> Runnable:
        if not self._has_types:
            return decodes, prompts
        return ((), prompts) if prompts and (self._is_prefill or not decodes) else (decodes, ())
