"""MXFP4: floats of 4 bits; 32 of them share a power of two as their scale. Experts of gpt-oss are published so.

A tensor `NAME` [experts, inputs, outputs] of the model lies in the files as

    NAME_blocks   [experts, outputs, inputs / 32, 16]   two numbers a byte, the first in the lower bits
    NAME_scales   [experts, outputs, inputs / 32]       exponents, 127 too large

Their numbers are not evenly spaced, so no whole numbers of 4 bits are equal to them: they are expanded while they are
read, an expert at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alignedserve.engine.weights.tensors import Cut, Tensors
from alignedserve.errors import ModelError

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)])  # by their 4 bits
_EXCESS = 127  # of the stored exponents


class Mxfp4Tensors(Tensors):
    """The tensors of a folder whose experts are in MXFP4, by the names of the expanded ones."""

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or self._is_packed(name)

    def _is_packed(self, name: str) -> bool:
        return super().__contains__(f"{name}_blocks") and super().__contains__(f"{name}_scales")

    def read_into(self, out: Tensor, name: str, cut: Cut | None = None) -> None:
        if not self._is_packed(name):
            super().read_into(out, name, cut)
            return
        assert cut is None or cut.dim == 0, "an expert in MXFP4 is read as a whole"
        experts, inputs, outputs = out.shape
        rows = None if cut is None else slice(cut.start, cut.start + experts)
        blocks, scales = self.stored(f"{name}_blocks", rows), self.stored(f"{name}_scales", rows)
        if blocks.shape != (experts, outputs, inputs // 32, 16) or scales.shape != blocks.shape[:-1] or inputs % 32:
            found = f"{tuple(blocks.shape)} and {tuple(scales.shape)}"
            raise ModelError(f"tensor {name} is stored in blocks and scales of {found}, it has {tuple(out.shape)}")
        for expert in range(experts):
            out[expert].copy_(expanded(blocks[expert], scales[expert]).T)


def expanded(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers [outputs, inputs] of blocks, in fp32."""
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)
    numbers = _NUMBERS[pairs.int()].flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - _EXCESS).flatten(-2)
