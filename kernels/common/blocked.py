"""Quantised weights as GPU kernels read them (kernels/triton/products.py), and linear layers of them.

The inputs are cut into blocks. Of a block the numbers of each output lie side by side, `half` bytes, and those of all
outputs one after the other, so a tile of some outputs is one stretch of memory:

    8 bits   byte i of a block: input i, from -128 to 127
    4 bits   byte i of a block: input i in its lower half, input half + i in its upper half

So a byte is read once, and no number has to change its place. Scales and zeros are [groups, outputs]. Where groups are
multiples of `half`, a tile of `half` inputs has one scale for each output, which its sums are multiplied by.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.kernels.common.linear import Linear, LinearPath, Way
from alignedserve.kernels.common.quantised import Packing, QuantisedLinear, QuantisedWeight

HALVES = (64, 32)  # bytes of an output in a block: the first that divides a group, or the last
MOST_WHOLE_INPUTS = 1 << 16  # products of bytes whose sum surely fits 32 bits


@dataclass(frozen=True)
class BlockedWeight(Packing):
    """A quantised weight [outputs, inputs] in blocks of inputs; the last is filled up.

    The memory is [blocks, outputs, half], of int8, or uint8 of 4 bits; zeros are of numbers from 0 on.
    """

    @classmethod
    def from_weight(cls, weight: QuantisedWeight) -> BlockedWeight:
        outputs, inputs = weight.shape
        one_group = weight.scale.shape[1] == 1
        half = next((half for half in HALVES if one_group or weight.group % half == 0), HALVES[-1])
        q = F.pad(weight.q, (0, -inputs % (half * 8 // weight.bits)))
        blocks = q.reshape(outputs, -1, 8 // weight.bits, half).permute(1, 2, 0, 3)
        if weight.bits == 8:
            memory = (blocks[:, 0] ^ 128).view(torch.int8).contiguous()
        else:
            memory = (blocks[:, 0] | blocks[:, 1] << 4).contiguous()
        scale, zero = (None if of is None else of.t().contiguous() for of in (weight.scale, weight.zero))
        assert scale is not None
        return cls(memory, scale, zero, weight.order, (outputs, inputs), weight.bits, weight.group)

    @property
    def half(self) -> int:
        return self.memory.shape[2]

    @property
    def is_whole(self) -> bool:
        """Return whether rows of x can be whole numbers too: each output has one scale, and no zero."""
        one_group = self.scale.shape[0] == 1
        return self.bits == 8 and one_group and self.zero is None and self.shape[1] <= MOST_WHOLE_INPUTS

    @property
    def is_tiled(self) -> bool:
        """Return whether `half` inputs that begin at a multiple of it have one scale."""
        return self.scale.shape[0] == 1 or self.group % self.half == 0

    def rows(self, outputs: Tensor) -> QuantisedWeight:
        of_blocks = self.memory[:, outputs].transpose(0, 1)  # [outputs, blocks, half]
        if self.bits == 8:
            q = of_blocks.contiguous().view(torch.uint8) ^ 128
        else:
            q = torch.stack((of_blocks & 15, of_blocks >> 4), 2)
        zero = None if self.zero is None else self.zero[:, outputs].t()
        numbers = q.reshape(len(outputs), -1)[:, : self.shape[1]]
        return QuantisedWeight(numbers, self.scale[:, outputs].t(), zero, self.bits, self.group, self.order)


class MultipliesBlocks(Protocol):
    """Kernels that multiply with a weight in blocks."""

    def multiply(
        self, x: Tensor, weight: BlockedWeight, bias: Tensor | None, out: Tensor, adds: bool = False
    ) -> None: ...


class BlockedLinear(QuantisedLinear):
    """A layer for GPUs."""

    def __init__(
        self, kernels: MultipliesBlocks, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self._kernels, self._blocks = kernels, BlockedWeight.from_weight(weight)
        super().__init__(self._blocks, bias, dtype)

    def below(self, first: int) -> Linear:
        bias = None if self.bias is None else self.bias[first:]
        rows = torch.arange(first, self.shape.out, device=self.memory.device)
        return BlockedLinear(self._kernels, self._blocks.rows(rows), bias, self.shape.dtype)

    @property
    def kind(self) -> Hashable:
        blocks = self._blocks
        return super().kind, blocks.scale.dtype, blocks.zero is None, blocks.group, self.bias is None

    def by(self, way: Way) -> LinearPath:
        return _BlockedPath(self._kernels, self._blocks, self.bias, self.shape.dtype)


class _BlockedPath(LinearPath):
    adds_at_once = True

    def __init__(
        self, kernels: MultipliesBlocks, weight: BlockedWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self._kernels, self._weight, self._bias, self._dtype = kernels, weight, bias, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self._into(x.new_empty((x.shape[0], self._weight.shape[0])), x)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        self._into(residual, x, adds=True)

    def wide(self, x: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            out = x.new_empty((x.shape[0], self._weight.shape[0]), dtype=torch.float32)
        return self._into(out, x)

    def _into(self, out: Tensor, x: Tensor, adds: bool = False) -> Tensor:
        outputs, inputs = self._weight.shape
        if x.shape[1] != inputs or x.dtype is not self._dtype:
            raise ValueError(f"rows of {x.shape[1]} {x.dtype} do not fit a layer of {inputs} {self._dtype}")
        if out.shape != (x.shape[0], outputs) or not out.is_contiguous():
            raise ValueError(f"the output is {tuple(out.shape)}, not {x.shape[0]}x{outputs}, its numbers side by side")
        if x.shape[0]:
            self._kernels.multiply(x, self._weight, self._bias, out, adds)
        return out
