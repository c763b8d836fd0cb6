"""Numbers of 4 or 8 bits that lie in words of 32, and the part of a weight that a rank has."""

from __future__ import annotations

import torch
from torch import Tensor

from alignedserve.engine.weights.tensors import Cut, whole_shape
from alignedserve.errors import ConfigError, ModelError, UnsupportedModel
from alignedserve.kernels.common.quantised import LEAST_GROUP, QuantisedWeight


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of each row of words, as bytes; the first number lies in the lowest bits."""
    rows = words.contiguous().view(torch.uint8)
    if bits == 8:
        return rows
    out = torch.empty(*rows.shape, 2, dtype=torch.uint8)
    torch.bitwise_and(rows, 15, out=out[..., 0])
    torch.bitwise_right_shift(rows, 4, out=out[..., 1])
    return out.flatten(1)


def bits_of(layer: str, words: int, numbers: int) -> int:
    """Return how many bits a number has where `numbers` of them are packed into `words` words."""
    for bits in (4, 8):
        if words == -(-numbers * bits // 32):
            return bits
    raise UnsupportedModel(f"layer {layer} keeps {numbers} numbers in {words} words of 32 bits: neither 4 nor 8 bits")


def group_size(layer: str, inputs: int, groups: int, configured: int | None = None) -> int:
    """Return how many inputs a group has; the last may have fewer only where the configuration says the size."""
    if configured is not None and groups == -(-inputs // configured):
        return configured
    if inputs % groups:
        raise UnsupportedModel(f"layer {layer}: {groups} groups do not divide its {inputs} inputs")
    return inputs // groups


def zeros_or_none(zeros: Tensor, scale: Tensor, bits: int) -> Tensor | None:
    """Return zeros in the type of the scales; None where all are the middle, so that nobody need keep them."""
    return None if bool((zeros == 1 << bits - 1).all()) else zeros.to(scale.dtype)


def by_group(q: Tensor, group_of: Tensor | None, group: int, layer: str) -> tuple[Tensor, Tensor | None]:
    """Return the columns in an order in which those of each group lie together, and that order; None where they do.

    `group_of` names the group of each input.
    """
    if group_of is None or bool((group_of < 0).all()):
        return q, None
    natural = torch.arange(q.shape[1]) // group
    if torch.equal(group_of.long(), natural):
        return q, None
    order = group_of.argsort(stable=True)
    if not torch.equal(group_of[order].long(), natural):
        raise UnsupportedModel(f"layer {layer}: its groups do not have {group} inputs each (g_idx)")
    return q[:, order], order


def part_of(weight: QuantisedWeight, layer: str, shape: tuple[int, int], cut: Cut | None) -> QuantisedWeight:
    """Return a rank's part of a whole layer, after checking the layer's shape."""
    whole = whole_shape(shape, cut)
    if weight.shape != whole:
        raise ModelError(f"layer {layer} has shape {weight.shape}, the configuration says {whole}")
    if weight.scale.shape != (whole[0], -(-whole[1] // weight.group)):
        raise ModelError(f"layer {layer}: scales of shape {tuple(weight.scale.shape)} do not fit {whole}")
    if weight.group % LEAST_GROUP and weight.scale.shape[1] > 1:
        raise UnsupportedModel(f"layer {layer}: groups of {weight.group} inputs, not a multiple of {LEAST_GROUP}")
    if cut is None:
        return weight
    if cut.dim == 0:
        return weight.rows(slice(cut.start, cut.start + shape[0]))
    return inputs_of(weight, layer, cut.start, shape[1])


def inputs_of(weight: QuantisedWeight, layer: str, first: int, count: int) -> QuantisedWeight:
    """Return a rank's part of the inputs of a layer, or of some of its outputs."""
    part = weight.inputs(first, count)
    if part is None:
        raise ConfigError(
            f"layer {layer}: ranks cannot divide its inputs, whose groups or order do not allow it:"
            " set engine.tensor_parallel_size to 1"
        )
    return part
