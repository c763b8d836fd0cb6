"""Weights of 8 or 4 bits with scales by groups of inputs, and linear layers of them.

    weight[output, input] = scale[output, group] * (q[output, input] - zero[output, group])

`QuantisedWeight` has these plainly, as files give them. A `QuantisedLinear` packs them for the kernels that read them:
`PanelLinear` for csrc/quantised.cpp, 64 outputs by four inputs at a time, and blocked.py for GPUs. Without that library
torch expands the weight in each call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from ctypes import Structure, addressof, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.kernels.common.linear import BUCKETS, CLayer, LayerShape, Linear, LinearPath, NativePath, Tuning, Way
from alignedserve.kernels.library import DTYPES, Library

FP8 = torch.float8_e4m3fn
LEAST_GROUP = 8  # inputs of a group are a multiple of it, where there are several groups
_PANEL, _FOUR = 64, 4  # outputs and inputs that lie together


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [outputs, inputs] as whole numbers."""

    q: Tensor  # uint8, not packed: also of 4 bits a number has a byte of its own
    scale: Tensor  # [outputs, groups]
    zero: Tensor | None  # likewise; None: the middle, 2^(bits - 1)
    bits: int  # 8 or 4
    group: int  # consecutive inputs of a group; the last may have fewer
    order: Tensor | None = None  # the input of the layer that each column multiplies, where they are not in their order

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.q.shape
        return outputs, inputs

    @property
    def num_bytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    @property
    def zeros(self) -> Tensor:
        """Return the zero of each group, also where it is the middle."""
        return torch.full_like(self.scale, 2 ** (self.bits - 1)) if self.zero is None else self.zero

    def expanded(self) -> Tensor:
        """Return the weight in fp32, its columns in the order of the layer's inputs."""
        zero = 2 ** (self.bits - 1) if self.zero is None else self.zero.float()[..., None]
        groups = _in_groups(self.q, self.group).sub_(zero).mul_(self.scale.float()[..., None])
        wide = groups.flatten(1)[:, : self.q.shape[1]]
        return wide if self.order is None else wide[:, self.order.argsort()]

    def room_for(self, outputs: int) -> QuantisedWeight:
        """Return a weight of this form with `outputs` outputs; its numbers are still to be written."""
        q, scale = (of.new_empty(outputs, of.shape[1]) for of in (self.q, self.scale))
        return replace(self, q=q, scale=scale, zero=None if self.zero is None else torch.empty_like(scale))

    def rows(self, chosen: slice | Tensor) -> QuantisedWeight:
        """Return the weight of some outputs."""
        zero = None if self.zero is None else self.zero[chosen]
        return replace(self, q=self.q[chosen], scale=self.scale[chosen], zero=zero)

    def inputs(self, first: int, count: int) -> QuantisedWeight | None:
        """Return the weight of some inputs, one after the other, in smaller groups where they cut groups; None where
        the columns have another order, or groups would be too small."""
        if self.order is not None:
            return None
        q = self.q[:, first : first + count].contiguous()
        if self.scale.shape[1] == 1:
            return replace(self, q=q, group=count)
        group = gcd(self.group, first, count)
        if group % LEAST_GROUP:
            return None
        scale, zero = self._by_groups_of(group, first, count)
        return replace(self, q=q, scale=scale, zero=zero, group=group)

    def finer(self, bits: int, group: int) -> QuantisedWeight:
        """Return the same numbers with more bits, and in smaller groups, which divide the present ones."""
        q = self.q if self.zero is not None else self.q + (2 ** (bits - 1) - 2 ** (self.bits - 1))
        scale, zero = self._by_groups_of(group, 0, self.shape[1])
        return replace(self, q=q, scale=scale, zero=zero, bits=bits, group=group)

    def _by_groups_of(self, group: int, first: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Return scales and zeros of some inputs in smaller groups, which divide the present ones."""
        groups, times = slice(first // group, -(-(first + count) // group)), self.group // group

        def smaller(of: Tensor) -> Tensor:
            return of.repeat_interleave(times, 1)[:, groups].contiguous()

        return smaller(self.scale), None if self.zero is None else smaller(self.zero)

    def on(self, device: torch.device) -> QuantisedWeight:
        """Return the weight on a device."""
        zero, order = (None if of is None else of.to(device) for of in (self.zero, self.order))
        return replace(self, q=self.q.to(device), scale=self.scale.to(device), zero=zero, order=order)


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [outputs, inputs] of 8-bit floats; with several groups of inputs only experts keep it so."""

    values: Tensor  # float8_e4m3fn [outputs, inputs]
    scale: Tensor  # fp32 [outputs, groups]
    group: int | None = None  # consecutive inputs of a group; None: there is one

    @property
    def memory(self) -> Tensor:
        return self.values

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def expanded(self) -> Tensor:
        """Return the weight in fp32."""
        inputs = self.shape[1]
        return self.values.float() * _by_input(self.scale, self.group or inputs, inputs)

    def rows(self, chosen: slice | Tensor) -> Fp8Weight:
        """Return the weight of some outputs."""
        as_bytes = self.values.view(torch.uint8)[chosen]  # torch indexes bytes everywhere
        return Fp8Weight(as_bytes.view(FP8), self.scale[chosen], self.group)

    def on(self, device: torch.device) -> Fp8Weight:
        """Return the weight on a device."""
        return Fp8Weight(self.values.to(device), self.scale.to(device), self.group)


AnyQuantised: TypeAlias = QuantisedWeight | Fp8Weight


_AT_ONCE = 1 << 21  # numbers that are made at a time: each takes a dozen bytes on the way


def rows_at_once(inputs: int) -> int:
    """Return how many outputs with `inputs` inputs each are read, quantised or packed at a time."""
    return max(1, _AT_ONCE // inputs)


def quantised(weight: Tensor, bits: int, group: int, squares: Tensor | None = None) -> QuantisedWeight:
    """Quantise a weight: 8 bits around zero, 4 bits with a scale and a zero of least squared error for each group.

    `squares` is the mean square of each input, where that is known: an error counts as much as its input is large.
    """
    outputs, inputs = weight.shape
    if squares is not None:  # an input that was silent on a short text still counts a little
        squares = _in_groups((squares.float() + _SILENT * squares.float().mean()).clamp_min(_LEAST)[None], group)
    return joined((_quantised(rows, bits, group, squares) for rows in weight.split(rows_at_once(inputs))), outputs)


_SCALES = torch.bfloat16
_SILENT = 0.01  # of the mean square of all inputs
_LEAST, _LEAST_SPREAD = 1e-30, 1e-6
_FITS = 2  # of scale and zero to what was rounded; more change little
# Zeros are multiples of a sixteenth from 0 to 15, so they, and numbers less their zeros, are exact in bf16 on GPUs.
_ZEROS, _MOST = 16, 15


def _in_groups(rows: Tensor, group: int) -> Tensor:
    """Return [rows, groups, group] in fp32; the last group is filled up with zeros."""
    rows, left = rows.float(), -rows.shape[1] % group
    groups: Tensor = (F.pad(rows, (0, left)) if left else rows).unflatten(1, (-1, group))
    return groups


def _quantised(rows: Tensor, bits: int, group: int, squares: Tensor | None) -> QuantisedWeight:
    groups, zero = _in_groups(rows, group), None
    if bits == 8:
        scale = (groups.abs().amax(2) / 127).clamp_min(_LEAST).to(_SCALES)
        whole = (groups / scale.float()[..., None]).round_().clamp_(-127, 127).add_(128)
    else:
        whole, scale, zero = _fitted(groups, squares)
    q = whole.flatten(1)[:, : rows.shape[1]].to(torch.uint8)
    return QuantisedWeight(q, scale, zero, bits, group)


def _fitted(groups: Tensor, squares: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return whole numbers from 0 to 15, and the scale and the zero of each group.

    They begin between the least and the largest number. Then in turn the numbers are rounded, and the line through
    what they stand for is fitted by least squares: its slope is the scale, and where it is 0 lies the zero.
    """
    least, most = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scale = (most - least) / _MOST
    zero = -least / scale.clamp_min(_LEAST)
    weigh = groups.new_ones(1, 1, groups.shape[2]) if squares is None else squares
    share = weigh / weigh.sum(2, keepdim=True)
    mean = (groups * share).sum(2)
    for fit in range(_FITS + 1):
        scale = scale.clamp_min(_LEAST).to(_SCALES).float()
        zero = zero.mul(_ZEROS).round_().clamp_(0, _ZEROS * _MOST).div_(_ZEROS)
        whole = (groups / scale[..., None]).add_(zero[..., None]).round_().clamp_(0, _MOST)
        if fit < _FITS:
            middle = (whole * share).sum(2)
            apart = whole - middle[..., None]
            weighed = apart * share
            spread, slope = (weighed * apart).sum(2), (weighed * groups).sum(2)
            has_slope = (spread > _LEAST_SPREAD) & (slope > 0)  # none where all are rounded to one number
            scale = torch.where(has_slope, slope / spread, scale)
            zero = (middle - mean / scale).clamp_(0, _MOST)
            # A group far from 0, such as 10 ± 0.3, would need a zero below 0 or above 15. The zero was clamped, so the
            # slope is fitted once more, for the line through the clamped zero.
            away = middle - zero
            scale = torch.where(has_slope, (slope + away * mean) / (spread + away * away), scale)
    return whole, scale.to(_SCALES), zero.to(_SCALES)


def joined(parts: Iterable[QuantisedWeight], outputs: int) -> QuantisedWeight:
    """Return weights of one form as one with `outputs` outputs; each is copied to its place as soon as it is made."""
    first, whole = 0, None
    for part in parts:
        if part.shape[0] == outputs:
            return part
        whole = part.room_for(outputs) if whole is None else whole
        place = whole.rows(slice(first, first + part.shape[0]))
        place.q.copy_(part.q)
        place.scale.copy_(part.scale)
        if place.zero is not None and part.zero is not None:
            place.zero.copy_(part.zero)
        first += part.shape[0]
    assert first == outputs, "the parts have all outputs"
    assert whole is not None
    return whole


def stacked(weights: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Return weights of the same inputs as one, the outputs of each after those of the one before.

    Where they differ, all get the bits of the widest, and groups that divide those of all; None where these would be
    too small, or where the orders of inputs differ.
    """
    first, group = weights[0], gcd(*[weight.group for weight in weights])
    if len(weights) == 1:
        return first
    is_too_small = group != first.group and group % LEAST_GROUP != 0
    if is_too_small or not all(_have_one_order(first, other) for other in weights[1:]):
        return None
    alike = [weight.finer(max(weight.bits for weight in weights), group) for weight in weights]
    has_zeros = any(weight.zero is not None for weight in weights)
    zero = torch.cat([weight.zeros for weight in alike]) if has_zeros else None
    q, scale = (torch.cat(of) for of in ([weight.q for weight in alike], [weight.scale for weight in alike]))
    return replace(alike[0], q=q, scale=scale, zero=zero)


def _have_one_order(a: QuantisedWeight, b: QuantisedWeight) -> bool:
    if a.order is None or b.order is None:
        return a.order is b.order
    return torch.equal(a.order, b.order)


def _by_input(of_groups: Tensor, group: int, inputs: int) -> Tensor:
    return of_groups.float().repeat_interleave(group, 1)[:, :inputs]


class CQuantised(Structure):
    """A quantised weight as csrc/kernels.h has it."""

    _fields_ = (
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("order", c_void_p),
        ("group", c_int64),
        ("groups", c_int64),
        ("bits", c_int32),
        ("dtype", c_int32),
    )


@dataclass(frozen=True)
class Packing(ABC):
    """A quantised weight in the layout that kernels read; `unpacked` is the weight in the layout of files."""

    memory: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    shape: tuple[int, int]  # outputs and inputs
    bits: int
    group: int

    @abstractmethod
    def rows(self, outputs: Tensor) -> AnyQuantised:
        """Return the weight of some outputs, as files have it."""

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    @property
    def unpacked(self) -> AnyQuantised:
        return self.rows(torch.arange(self.shape[0], device=self.memory.device))

    def expanded(self) -> Tensor:
        return self.unpacked.expanded()


@dataclass(frozen=True)
class PackedWeight(Packing):
    """A weight as the C++ kernel reads it: outputs are filled up to panels, inputs to groups of eights.

    The memory is uint8 [panels, inputs / 4, 64, 4], of 4 bits [panels, inputs / 8, 64, 4]; scales and zeros are
    [panels, groups, 64].
    """

    @classmethod
    def from_weight(cls, weight: QuantisedWeight, library: Library | None = None) -> PackedWeight:
        (outputs, inputs), in_panels = weight.shape, partial(_in_panels, library=library)
        group = weight.group if weight.group % LEAST_GROUP == 0 else _filled(weight.group, LEAST_GROUP)
        if group != weight.group and weight.scale.shape[1] > 1:
            raise ValueError(f"groups of {weight.group} inputs: the kernel takes multiples of {LEAST_GROUP}")
        q = F.pad(weight.q, (0, -inputs % group)) if inputs % group else weight.q
        memory = in_panels(q.contiguous().view(torch.int32), weight.bits == 4)
        memory = memory.view(torch.uint8).view(*memory.shape, _FOUR)
        zero = None if weight.zero is None else in_panels(weight.zero)
        order = None if weight.order is None else weight.order.to(torch.int32)
        return cls(memory, in_panels(weight.scale), zero, order, (outputs, inputs), weight.bits, group)

    def rows(self, outputs: Tensor) -> QuantisedWeight:
        panel, within = outputs // _PANEL, outputs % _PANEL
        bytes_of = self.memory[panel, :, within]  # [outputs, inputs / 4 or / 8, 4]
        if self.bits == 4:
            bytes_of = torch.stack((bytes_of & 15, bytes_of >> 4), 2)
        q = bytes_of.reshape(len(outputs), -1)[:, : self.shape[1]]
        zero = None if self.zero is None else self.zero[panel, :, within]
        order = None if self.order is None else self.order.long()
        return QuantisedWeight(q, self.scale[panel, :, within], zero, self.bits, self.group, order)

    def in_c(self) -> CQuantised:
        zero, order = (None if of is None else of.data_ptr() for of in (self.zero, self.order))
        dtype, groups = DTYPES[self.scale.dtype], self.scale.shape[1]
        return CQuantised(self.scale.data_ptr(), zero, order, self.group, groups, self.bits, dtype)


def _filled(number: int, to: int) -> int:
    return -(-number // to) * to


def _in_panels(rows: Tensor, halves: bool = False, library: Library | None = None) -> Tensor:
    """Return [panels, columns, 64] of rows, [outputs, columns]. With `halves` two words, of four numbers below 16 each,
    become one: the second is kept in the upper halves of the bytes."""
    outputs, columns = rows.shape
    panels = rows.new_empty(-(-outputs // _PANEL), columns // (1 + halves), _PANEL)
    if library is not None and rows.element_size() == 4 and not rows.is_cuda:
        pack = library.kernel("panels", c_void_p, c_int64, c_int64, c_int, c_void_p)
        pack(rows.contiguous().data_ptr(), outputs, columns, int(halves), panels.data_ptr())
        return panels
    at_once = -(-rows_at_once(columns) // _PANEL)
    for place, part in zip(panels.split(at_once), rows.split(at_once * _PANEL), strict=True):
        words = part[:, 0::2] | part[:, 1::2] << 4 if halves else part
        place.copy_(F.pad(words, (0, 0, 0, -len(words) % _PANEL)).view(len(place), _PANEL, -1).transpose(1, 2))
    return panels


class QuantisedLinear(Linear):
    """A linear layer of a quantised weight, for x of `dtype`. No way of computing it is chosen by measuring."""

    in_c: CLayer | None = None
    library: Library | None = None

    def __init__(self, packed: Packing | Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._packed = packed
        self.memory = packed.memory
        self.bias = None if bias is None else bias.detach().to(dtype).contiguous()
        self.shape = LayerShape(*packed.shape, dtype)
        self.shared = True
        self._total = self._adapt = None
        self.use(Tuning())

    @property
    def kind(self) -> Hashable:
        """Return what layers have in common for which a kernel is compiled and measured once."""
        return self.shape, self.memory.shape, self.memory.dtype

    @property
    def num_bytes(self) -> int:
        return self._packed.num_bytes

    @property
    def weight(self) -> Tensor:
        """Return the weight expanded: a copy."""
        return self._packed.expanded().to(self.shape.dtype)

    def rows(self, tokens: Tensor) -> Tensor:
        return self._packed.rows(tokens.flatten()).expanded().to(self.shape.dtype).view(*tokens.shape, -1)

    def outputs(self, first: int, count: int) -> AnyQuantised:
        """Return the weight of some outputs, unpacked."""
        return self._packed.rows(torch.arange(first, first + count, device=self.memory.device))

    def pack(self, back: bool = False) -> bool:
        return False

    @property
    def ways(self) -> list[Way]:
        return [Way.NATIVE] if self.library else [Way.TORCH]

    def use(self, tuning: Tuning) -> None:
        """Use the only way that there is."""
        super().use(Tuning({self.shape: tuple(self.ways) * len(BUCKETS)}))

    def by(self, way: Way) -> LinearPath:
        return ExpandingPath(self._packed, self.bias, self.shape.dtype)


class PanelLinear(QuantisedLinear):
    """A layer that is packed for csrc/quantised.cpp."""

    def __init__(
        self, weight: QuantisedWeight, bias: Tensor | None, library: Library | None, dtype: torch.dtype
    ) -> None:
        self.library = library if weight.q.device.type == "cpu" and dtype in DTYPES else None
        packed = PackedWeight.from_weight(weight, self.library)
        self._panels, self._quantised_in_c = packed, packed.in_c()
        super().__init__(packed, bias, dtype)
        if self.library:
            self.in_c = self._layer_in_c()
            self.use(Tuning())

    def below(self, first: int) -> Linear:
        bias = None if self.bias is None else self.bias[first:]
        rows = torch.arange(first, self.shape.out, device=self.memory.device)
        return PanelLinear(self._panels.rows(rows), bias, self.library, self.shape.dtype)

    def _layer_in_c(self) -> CLayer:
        bias, of = None if self.bias is None else self.bias.data_ptr(), addressof(self._quantised_in_c)
        shape = self.shape
        return CLayer(self.memory.data_ptr(), bias, shape.inputs, shape.out, DTYPES[shape.dtype], 0, of)

    def by(self, way: Way) -> LinearPath:
        if self.library and self.in_c:
            alive = self._packed, self.bias, self._quantised_in_c
            return NativePath(self.library, self.in_c, self.shape, alive)
        return super().by(way)


class ExpandingPath(LinearPath):
    """Expand the weight in each call, and multiply in torch."""

    def __init__(self, packed: Packing | Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._packed, self._bias, self._dtype = packed, bias, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._packed.expanded().to(self._dtype), self._bias)
