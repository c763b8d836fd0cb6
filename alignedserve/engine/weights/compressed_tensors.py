"""compressed-tensors: whole numbers around zero, packed as `weight_packed` [outputs, inputs / 8] or a byte each as
`weight`; `weight_scale` by tensor, output or group; `weight_zero_point` packed by outputs, and `weight_g_idx`, the
group of each input. Layers that have none of these are plain, or 8-bit floats (float8.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from alignedserve.engine.weights.float8 import Float8
from alignedserve.engine.weights.packed import bits_of, by_group, group_size, part_of, unpacked, zeros_or_none
from alignedserve.engine.weights.tensors import Cut, Tensors
from alignedserve.kernels.common.quantised import AnyQuantised, QuantisedWeight


class CompressedTensors(Float8):
    def read(self, tensors: Tensors, layer: str, shape: tuple[int, int], cut: Cut | None) -> AnyQuantised | None:
        inputs = cut.whole if cut is not None and cut.dim == 1 else shape[1]
        if f"{layer}.weight_packed" in tensors:
            words = tensors.stored(f"{layer}.weight_packed")
            bits = bits_of(layer, words.shape[1], inputs)
            q = unpacked(words, bits)[:, :inputs]
        elif f"{layer}.weight" in tensors and tensors.stored_type(f"{layer}.weight") == "I8":
            bits = 8
            q = _above_zero(tensors.stored(f"{layer}.weight"))
        else:
            return super().read(tensors, layer, shape, cut)
        outputs, scale = q.shape[0], tensors.stored(f"{layer}.weight_scale")
        scale = scale.reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1).expand(outputs, -1).contiguous()
        group = group_size(layer, inputs, scale.shape[1])
        zero = _zeros(tensors, layer, scale, bits)
        group_of = tensors.stored(f"{layer}.weight_g_idx") if f"{layer}.weight_g_idx" in tensors else None
        q, order = by_group(q, group_of, group, layer)
        return part_of(QuantisedWeight(q, scale, zero, bits, group, order), layer, shape, cut)


def _zeros(tensors: Tensors, layer: str, scale: Tensor, bits: int) -> Tensor | None:
    name = f"{layer}.weight_zero_point"
    if name not in tensors:
        return None
    zeros = tensors.stored(name)
    if zeros.dtype == torch.int32:
        zeros = unpacked(zeros.t(), bits).t()[: scale.shape[0]]
    else:
        zeros = (zeros.to(torch.int16) + (1 << bits - 1)).reshape(-1, scale.shape[1]).expand_as(scale)
    return zeros_or_none(zeros, scale, bits)


def _above_zero(q: Tensor) -> Tensor:
    """Return 128 more than each number: the sign's bit turns round."""
    return q.view(torch.uint8) ^ 128
