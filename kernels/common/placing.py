"""Copy a step's inputs from the CPU to the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_SECTIONS = 1 << 20  # bytes for the sections of the largest step, without those for each row
_OF_ROW = 512  # bytes of a row: some 100 in its own numbers, and 36 for each way in which attention cuts it into tiles
_ALIGNED = 16  # bytes: Triton compiles another kernel for addresses that are no multiple of it


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, without waiting for the device's work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def put(out: Tensor, values: Tensor) -> None:
    """Copy the values to `out` on the device, without waiting for the device's work; they may change from now on.

    Values leave from pinned memory of torch's pool, which hands that out again only once the copy has ended."""
    out.copy_(values.pin_memory() if out.device.type == "cuda" else values, non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class Section(NamedTuple):
    """A part of what a captured step reads: filled on the CPU, read on the device."""

    host: Tensor
    device: Tensor

    def fill(self, numbers: Sequence[int], others: int = 0) -> None:
        """Fill a section of int64 with these numbers, and with another behind the last one."""
        padded = array("q", [*numbers, *[others] * (len(self.host) - len(numbers))])
        self.host.copy_(torch.frombuffer(padded, dtype=torch.int64))


class StepMemory:
    """Memory for what captured steps read, on the CPU and on the device: one copy brings all of a step there.

    Steps of all sizes share it, since one of them is placed and replayed at a time. Sections of a size lie at fixed
    places, before the blocks of the step's requests:

        ┄┄┄┄┄┄┄┄ │ pieces │ tokens │ slots │ positions │ blocks of the step's requests │ ┄ room for more blocks ┄
                 └────────────────────────── one copy ─────────────────────────────────┘
    """

    def __init__(self, entries: int, rows: int, device: torch.device, table: int = 0) -> None:
        """Make room for `entries` blocks and for the sections of steps of up to `rows` rows.

        One of the sections may be a table of `table` blocks."""
        self.device, self.begin = device, _SECTIONS + rows * _OF_ROW + _aligned(4 * table)
        self.host = torch.zeros(self.begin + 4 * entries, dtype=torch.uint8)
        self.there = torch.zeros(len(self.host), dtype=torch.uint8, device=device)
        self.blocks = Section(*(bytes_[self.begin :].view(torch.int32) for bytes_ in (self.host, self.there)))


class StepInputs:
    """What the captured steps of one size read: sections, and the blocks of the step's requests behind them."""

    def __init__(self, memory: StepMemory) -> None:
        self.memory, self._first = memory, memory.begin

    def section(self, count: int, dtype: torch.dtype) -> Section:
        """Return a new section of this many numbers. Each step must fill all of it: other sizes have other sections
        there."""
        size = count * dtype.itemsize
        self._first -= _aligned(size)
        if self._first < 0:
            raise RuntimeError(f"the inputs of a captured step take more than {self.memory.begin} bytes")
        at = slice(self._first, self._first + size)
        return Section(self.memory.host[at].view(dtype), self.memory.there[at].view(dtype))

    def send(self, num_blocks: int) -> None:
        """Copy all sections and so many blocks to the device."""
        at = slice(self._first, self.memory.begin + 4 * num_blocks)
        put(self.memory.there[at], self.memory.host[at])
