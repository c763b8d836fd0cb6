"""The forms in which folders keep quantised weights, and which of them a folder has."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.gguf.places import PLACES
from alignedserve.architectures.stored_form import StoredForm, StoredMethod, ZeroForm
from alignedserve.engine.weights.gguf_weights import GgufWeights
from alignedserve.engine.weights.packed import bits_of, by_group, group_size, part_of, unpacked, zeros_or_none
from alignedserve.engine.weights.tensors import PLAIN, Cut, Form, Tensors, Weights
from alignedserve.errors import ModelError
from alignedserve.kernels.common.quantised import FP8, AnyQuantised, Fp8Weight, QuantisedWeight, rows_at_once

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)])  # by their 4 bits
_EXCESS = 127  # of the stored exponents


class Mxfp4Tensors(Tensors):
    """MXFP4: floats of 4 bits; 32 of them share a power of two as their scale. Experts of gpt-oss are published so.

    A tensor `NAME` [experts, inputs, outputs] of the model lies in the files as

        NAME_blocks   [experts, outputs, inputs / 32, 16]   two numbers a byte, the first in the lower bits
        NAME_scales   [experts, outputs, inputs / 32]       exponents, 127 too large

    Their numbers are not evenly spaced, so no whole numbers of 4 bits are equal to them: they are expanded while
    they are read, an expert at a time.
    """

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


_STORED = "F8_E4M3"  # as safetensors calls it
_SCALES = ("weight_scale", "weight_scale_inv")  # both are factors of the stored numbers


class Float8(Form):
    """Weights of 8-bit floats, with scales by tensor, output, group or block.

    Their numbers are not evenly spaced, so no whole numbers of 8 bits are equal to them. GPUs that multiply such
    floats take those with scales by tensor or output as they are (kernels/common/fp8.py), and experts those with
    scales by block too (kernels/common/experts.py); all else is expanded while it is read.
    """

    expands = True

    def __init__(self, block: tuple[int, int] | None) -> None:
        self._block = block

    def read(self, tensors: Tensors, layer: str, shape: tuple[int, int], cut: Cut | None) -> AnyQuantised | None:
        name = f"{layer}.weight"
        if name not in tensors or tensors.stored_type(name) != _STORED:
            return None
        scale = tensors.stored(self._scale_of(tensors, name, FP8)).float()
        if self._block is not None:
            return self._in_blocks(tensors.part(name, shape, cut), scale, self._block, cut)
        outputs = cut.whole if cut is not None and cut.dim == 0 else shape[0]
        if scale.numel() == outputs and scale.shape[0] == outputs and cut is not None and cut.dim == 0:
            scale = scale[cut.start : cut.start + shape[0]]
        elif scale.numel() not in (1, outputs):
            return None
        return Fp8Weight(tensors.part(name, shape, cut), scale.reshape(-1, 1).expand(shape[0], 1).contiguous())

    @staticmethod
    def _in_blocks(values: Tensor, scale: Tensor, block: tuple[int, int], cut: Cut | None) -> Fp8Weight | None:
        """Return a weight whose outputs have the scales of their blocks, or None where a cut divides blocks."""
        (outputs, inputs), first = values.shape, [cut.start if cut and cut.dim == dim else 0 for dim in (0, 1)]
        groups = slice(first[1] // block[1], -(-(first[1] + inputs) // block[1]))
        if first[1] % block[1] or scale.dim() != 2 or scale.shape[1] < groups.stop:
            return None
        by_output = _of_each(scale, 0, first[0], outputs, block[0]).expand(outputs, -1)
        return Fp8Weight(values, by_output[:, groups].contiguous(), block[1])

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


def weights_of(folder: Path) -> Weights:
    """Return the weights of a folder, by the format of its files."""
    if (folder / PLACES).is_file():
        return GgufWeights(folder)
    stored = read_config(folder).stored
    is_mxfp4 = stored is not None and stored.method is StoredMethod.MXFP4
    return (Mxfp4Tensors if is_mxfp4 else Tensors)(folder, _form_of(stored))


def _form_of(stored: StoredForm | None) -> Form:
    if stored is None:
        return PLAIN
    match stored.method:
        case StoredMethod.GGUF:
            raise ModelError("the model was made of a GGUF file, but its folder has lost the table of its tensors")
        case StoredMethod.MXFP4:  # beside its experts
            return PLAIN
        case StoredMethod.GPTQ:
            return Gptq(stored.zeros, stored.group)
        case StoredMethod.AWQ:
            return Awq()
        case StoredMethod.COMPRESSED_TENSORS:
            return CompressedTensors(stored.block)
        case StoredMethod.FP8:
            return Float8(stored.block)


class CompressedTensors(Float8):
    """compressed-tensors: whole numbers around zero, packed as `weight_packed` [outputs, inputs / 8] or a byte each as
    `weight`; `weight_scale` by tensor, output or group; `weight_zero_point` packed by outputs, and `weight_g_idx`,
    the group of each input. Layers that have none of these are plain, or 8-bit floats (`Float8`)."""

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


_ONES = {4: 0x11111111, 8: 0x01010101}  # a one in each number of a word


class Gptq(Form):
    """GPTQ: `qweight` [inputs / 8, outputs] holds eight numbers of 4 bits, of inputs one after the other, in each word
    (or four of 8 bits); `scales` [groups, outputs], `qzeros` [groups, outputs / 8], and `g_idx`, the group of each
    input."""

    def __init__(self, zeros: ZeroForm, group: int | None) -> None:
        self._zeros, self._group = zeros, group

    def read(self, tensors: Tensors, layer: str, shape: tuple[int, int], cut: Cut | None) -> QuantisedWeight | None:
        if f"{layer}.qweight" not in tensors:
            return None
        words, scale = tensors.stored(f"{layer}.qweight"), tensors.stored(f"{layer}.scales").t().contiguous()
        inputs = cut.whole if cut is not None and cut.dim == 1 else shape[1]
        bits, group = bits_of(layer, words.shape[0], inputs), group_size(layer, inputs, scale.shape[1], self._group)
        zeros = tensors.stored(f"{layer}.qzeros")
        if self._zeros is ZeroForm.LESS_ONE:  # words are added, as its writer subtracts words: a one may be carried
            zeros = zeros + torch.tensor(_ONES[bits], dtype=torch.int32)
        zero = zeros_or_none(unpacked(zeros, bits).t()[: scale.shape[0]], scale, bits)
        group_of = tensors.stored(f"{layer}.g_idx") if f"{layer}.g_idx" in tensors else None
        q, order = by_group(unpacked(words.t(), bits)[:, :inputs], group_of, group, layer)
        return part_of(QuantisedWeight(q, scale, zero, bits, group, order), layer, shape, cut)


_AWQ_BITS = 4


class Awq(Form):
    """AWQ: `qweight` [inputs, outputs / 8] holds eight numbers of 4 bits in each word, of outputs in the order 0, 2,
    4, 6, 1, 3, 5, 7; `qzeros` [groups, outputs / 8] likewise, and `scales` [groups, outputs]."""

    def read(self, tensors: Tensors, layer: str, shape: tuple[int, int], cut: Cut | None) -> QuantisedWeight | None:
        if f"{layer}.qweight" not in tensors:
            return None
        scale = tensors.stored(f"{layer}.scales").t().contiguous()
        q, zeros = (_by_output(tensors.stored(f"{layer}.{name}")) for name in ("qweight", "qzeros"))
        group = group_size(layer, q.shape[1], scale.shape[1])
        weight = QuantisedWeight(q, scale, zeros_or_none(zeros, scale, _AWQ_BITS), _AWQ_BITS, group)
        return part_of(weight, layer, shape, cut)


def _by_output(words: Tensor) -> Tensor:
    inputs, of_outputs = words.shape
    by_word = unpacked(words, _AWQ_BITS).view(inputs, of_outputs, 2, 4)  # the four with even numbers, then the odd ones
    return by_word.permute(1, 3, 2, 0).reshape(8 * of_outputs, inputs)
