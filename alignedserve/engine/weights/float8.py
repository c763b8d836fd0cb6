"""Weights of 8-bit floats, with scales by tensor, output, group or block.

Their numbers are not evenly spaced, so no whole numbers of 8 bits are equal to them. GPUs that multiply such floats
take those with scales by tensor or output as they are (kernels/common/fp8.py); all else is expanded while it is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alignedserve.engine.weights.packed import group_size
from alignedserve.engine.weights.tensors import Cut, Form, Tensors
from alignedserve.errors import ModelError
from alignedserve.kernels.common.quantised import FP8, AnyQuantised, Fp8Weight, rows_at_once

_STORED = "F8_E4M3"  # as safetensors calls it
_SCALES = ("weight_scale", "weight_scale_inv")  # both are factors of the stored numbers


class Float8(Form):
    expands = True

    def __init__(self, block: tuple[int, int] | None) -> None:
        self._block = block

    def read(self, tensors: Tensors, layer: str, shape: tuple[int, int], cut: Cut | None) -> AnyQuantised | None:
        name = f"{layer}.weight"
        if self._block is not None or name not in tensors or tensors.stored_type(name) != _STORED:
            return None
        scale = tensors.stored(self._scale_of(tensors, name, FP8)).float()
        outputs = cut.whole if cut is not None and cut.dim == 0 else shape[0]
        if scale.numel() == outputs and scale.shape[0] == outputs and cut is not None and cut.dim == 0:
            scale = scale[cut.start : cut.start + shape[0]]
        elif scale.numel() not in (1, outputs):
            return None
        return Fp8Weight(tensors.part(name, shape, cut), scale.reshape(-1, 1).expand(shape[0], 1).contiguous())

    def _scale_of(self, tensors: Tensors, name: str, held: object) -> str:
        layer = name.removesuffix(".weight")
        named = next((f"{layer}.{scale}" for scale in _SCALES if f"{layer}.{scale}" in tensors), None)
        if named is None:
            raise ModelError(f"tensor {name} holds {held}, and there is no {layer}.{_SCALES[0]}")
        return named

    def expand(self, tensors: Tensors, name: str, part: Tensor, cut: Cut | None, out: Tensor) -> None:
        scale = tensors.stored(self._scale_of(tensors, name, part.dtype)).float()
        scale = scale.reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
        inputs = cut.whole if cut is not None and cut.dim == 1 else part.shape[1]
        block = self._block or (1, group_size(name.removesuffix(".weight"), inputs, scale.shape[1]))
        first = [cut.start if cut is not None and cut.dim == dim else 0 for dim in (0, 1)]
        scale, at_once = _of_each(scale, 1, first[1], part.shape[1], block[1]), rows_at_once(part.shape[1])
        for begin in range(0, len(part), at_once):
            rows = part[begin : begin + at_once].float()
            out[begin : begin + at_once] = rows.mul_(_of_each(scale, 0, first[0] + begin, len(rows), block[0]))


def _of_each(scale: Tensor, dim: int, first: int, count: int, block: int) -> Tensor:
    """Return the scales of `count` outputs or inputs from `first` on, or the only one."""
    if scale.shape[dim] == 1:
        return scale
    return scale.index_select(dim, torch.arange(first, first + count) // block)
