"""Spans for steps that are captured once and replayed: a fixed number of requests with one token each, in fixed memory.

A captured step reads what its buffers hold when it is replayed. `place` puts another step's requests there: on the CPU
for kernels that look there, and on the device for kernels that read tables of their own. A kernel makes such a table
(`kept`) once, in memory that stays, and provides how it is refilled.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from alignedserve.kernels.common.placing import put
from alignedserve.kernels.common.spans import Lie, Spans

_ONE = Lie(1, 1, (0,))


@runtime_checkable
class Refilled(Protocol):
    def refill(self) -> None:
        """Fill the table again, for the requests that are there now."""


class BlockRoom:
    """Room for the blocks of all requests of a step, those of their last tokens included.

    A block that several requests read is there once for each of them.
    """

    def __init__(self, entries: int, device: torch.device) -> None:
        self.device = device
        self.blocks = array("i", bytes(4 * entries))
        self.device_blocks = torch.zeros(entries, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self.blocks)


class StaticSpans(Spans):
    def __init__(self, size: int, block_size: int, room: BlockRoom) -> None:
        """Use this room, which may be that of others too: of all of them, one is placed and replayed at a time."""
        super().__init__([_ONE] * size, block_size)
        self.device = device = room.device
        self._blocks, self.device_blocks = room.blocks, room.device_blocks
        self._device_positions = torch.zeros(size, dtype=torch.long, device=device)
        self._device_slots = torch.zeros(size, dtype=torch.long, device=device)

    def place(self, lies: Sequence[Lie]) -> None:
        """Place these requests, as many as were captured, each with one token."""
        spans = Spans(lies, self.block_size)
        if len(spans) != len(self) or spans.num_rows != len(self):
            raise ValueError(f"{len(spans)} requests with {spans.num_rows} tokens do not fit {len(self)} places")
        if len(spans._blocks) > len(self._blocks):
            raise ValueError(f"{len(spans._blocks)} blocks do not fit {len(self._blocks)} places")
        for own, its in ((self._tokens, spans._tokens), (self._starts, spans._starts), (self._blocks, spans._blocks)):
            own[: len(its)] = its
        used = len(spans._blocks)
        put(self._device_positions, spans.positions)
        put(self._device_slots, spans.new_slots)
        put(self.device_blocks[:used], spans.blocks)
        for kept in self._kept.values():
            if isinstance(kept, Refilled):
                kept.refill()

    @property
    def positions(self) -> torch.Tensor:
        """Return the positions on the device."""
        return self._device_positions

    @property
    def new_slots(self) -> torch.Tensor:
        """Return the slots of the new tokens on the device."""
        return self._device_slots
