"""Mixtures of experts: which experts a token chooses, their weights for kernels that run all at once, and what these
kernels compute, in torch.

Each expert's weights stay where they were loaded. A kernel finds them by a table of addresses on the device, so it asks
nobody which experts a step has chosen:

    addresses   expert 0     expert 1     expert 2    ...
    up          0x7f...      0x7f...      0x7f...            each [2 * inner, hidden]: gate, then up
    up_bias     0            0            0                  0: there is none
    up_scale    0            0            0                  of quantised weights
    up_zero     0            0            0
    down        0x7f...      0x7f...      0x7f...            each [hidden, inner]
    ...

Quantised weights stay so: a kernel multiplies rows as they are with the numbers that bytes stand for, which the dtypes
of rows hold exactly, and scales the sums of each group of inputs in fp32. The layers that all rows take do otherwise
with 8 bits: there rows become bytes too (fp8.py, triton/products.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from alignedserve.architectures.routing import Clamp, Routing, Scores
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import (
    FP8,
    AnyQuantised,
    Fp8Weight,
    Packing,
    QuantisedLinear,
    QuantisedWeight,
)

LEAST_SUM = 1e-20  # of shares, before they are divided by it
HALF = 16  # inputs in the lower halves of bytes, before as many in the upper ones
_LEAST_GROUP = 32  # inputs of a tile


@dataclass(frozen=True)
class ExpertPacking(Packing):
    """A quantised weight of an expert: its outputs lie one after the other.

    The memory is uint8 [outputs, inputs], of 4 bits [outputs, inputs / 2]: the numbers of files, two in a byte. Scales
    and zeros are [groups, outputs].
    """

    is_float: bool

    @classmethod
    def from_weight(cls, weight: AnyQuantised) -> ExpertPacking | None:
        """Return the weight packed; None where inputs have an order of their own, or tiles would have several groups
        of inputs."""
        scale, group = weight.scale.t().contiguous(), weight.group or weight.shape[1]
        if len(scale) > 1 and group % _LEAST_GROUP:
            return None
        if isinstance(weight, Fp8Weight):
            memory = weight.values.contiguous().view(torch.uint8)
            return cls(memory, scale, None, None, weight.shape, 8, group, is_float=True)
        if weight.order is not None:
            return None
        memory = weight.q
        if weight.bits == 4:
            halves = F.pad(memory, (0, -memory.shape[1] % (2 * HALF))).unflatten(1, (-1, 2, HALF))
            memory = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
        zero = None if weight.zero is None else weight.zero.t().to(scale.dtype).contiguous()
        return cls(memory.contiguous(), scale, zero, None, weight.shape, weight.bits, group, is_float=False)

    @property
    def has_one_group(self) -> bool:
        return len(self.scale) == 1

    @property
    def form(self) -> Hashable:
        """Return what kernels are compiled for."""
        return self.bits, self.is_float, self.has_one_group or self.group, self.scale.dtype, self.zero is None

    def rows(self, outputs: Tensor) -> AnyQuantised:
        q, scale = self.memory[outputs], self.scale[:, outputs].t()
        if self.is_float:
            return Fp8Weight(q.view(FP8), scale, self.group)
        if self.bits == 4:
            halves = q.unflatten(1, (-1, 1, HALF))
            q = torch.cat((halves & 15, halves >> 4), 2).flatten(1)[:, : self.shape[1]]
        zero = None if self.zero is None else self.zero[:, outputs].t()
        return QuantisedWeight(q, scale, zero, self.bits, self.group)


class ExpertLinear(QuantisedLinear):
    """A quantised layer of an expert: kernels run many at once, and one alone expands its weight."""

    def __init__(self, packing: ExpertPacking, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.packing = packing
        super().__init__(packing, bias, dtype)


@dataclass(frozen=True)
class ExpertWeights:
    ups: Sequence[Linear]  # one of each expert: gate and up
    downs: Sequence[Linear]
    clamp: Clamp | None
    taken: int  # experts of a row
    weighs_inputs: bool  # whether a share is a factor of what an expert reads, not of what it makes

    @cached_property
    def addresses(self) -> Tensor:
        """Return int64 [8, experts], as drawn above, of experts that are alike."""
        if not self.are_alike:
            raise ValueError("experts that run at once must have weights alike")
        rows = [
            [0 if of is None else of.data_ptr() for of in column]
            for layers in (self.ups, self.downs)
            for column in zip(*map(_tensors_of, layers), strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.ups[0].memory.device)

    @property
    def are_alike(self) -> bool:
        """Return whether one kernel can run all experts: they have one shape and form, and biases or none."""
        return all(len({*map(_kind, layers)}) == 1 and not layers[0].packed for layers in (self.ups, self.downs))

    @cached_property
    def packings(self) -> Sequence[ExpertPacking | None]:
        """Return what the weights of up and of down are like, where they are quantised."""
        return [_packing(layers[0]) for layers in (self.ups, self.downs)]

    def __len__(self) -> int:
        return len(self.ups)

    @property
    def kind(self) -> Hashable:
        """Return what layers have in common for which kernels are compiled and measured once."""
        return len(self), self.taken, self.clamp, _kind(self.ups[0]), _kind(self.downs[0])

    @property
    def hidden(self) -> int:
        return self.downs[0].shape.out

    @property
    def inner(self) -> int:
        return self.downs[0].shape.inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.ups[0].shape.dtype


def _packing(layer: Linear) -> ExpertPacking | None:
    return layer.packing if isinstance(layer, ExpertLinear) else None


def _kind(layer: Linear) -> Hashable:
    packing = _packing(layer)
    return layer.shape, layer.bias is None, layer.memory.dtype if packing is None else packing.form


def _tensors_of(layer: Linear) -> tuple[Tensor | None, ...]:
    packing = _packing(layer)
    return layer.memory, layer.bias, *((None, None) if packing is None else (packing.scale, packing.zero))


def route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the experts of each row, and their shares, both [rows, chosen], from logits [rows, experts] in fp32.

    The bias of an expert, [experts], counts in the choice alone.
    """
    scores = logits.softmax(-1) if routing.scores is Scores.SOFTMAX else logits.sigmoid()
    wished = scores if bias is None else scores + bias
    if routing.groups > 1:
        wished = _within_groups(wished, routing, bias is not None)
    chosen = wished.topk(routing.chosen, dim=-1, sorted=False).indices
    shares = scores.gather(1, chosen)
    if routing.is_normalised:
        shares = shares / (shares.sum(-1, keepdim=True) + LEAST_SUM)
    return chosen, shares * routing.factor


def _within_groups(wished: Tensor, routing: Routing, is_biased: bool) -> Tensor:
    """Return the scores with those of all groups but the best hidden.

    A group counts as much as its best expert, or as its two best where experts have a bias.
    """
    by_group = wished.unflatten(-1, (routing.groups, -1))
    worth = by_group.topk(2, dim=-1).values.sum(-1) if is_biased else by_group.amax(-1)
    best = worth.topk(routing.chosen_groups, dim=-1, sorted=False).indices
    is_hidden = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    hidden: Tensor = by_group.masked_fill(is_hidden[..., None], -torch.inf)
    return hidden.flatten(-2)


def add_experts(
    x: Tensor,
    experts: ExpertWeights,
    chosen: Tensor,
    shares: Tensor,
    out: Tensor | None,
    silu_mul: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return what its experts make of each row of x, one expert after another, added to `out` where that is given.

    `chosen` and `shares` are [rows, experts of a row]. The CPU must know how many rows each expert has.
    """
    by_expert = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    taken = x.index_select(0, by_expert.div(chosen.shape[1], rounding_mode="floor"))
    by_pair = shares.flatten().index_select(0, by_expert)[:, None]
    if experts.weighs_inputs:
        taken *= by_pair
    made = []
    for rows, up, down in zip(taken.split(counts), experts.ups, experts.downs, strict=True):
        if len(rows):
            both = up(rows)
            made.append(down.share(silu_mul(both) if experts.clamp is None else clamped(both, experts.clamp)))
    of_pairs = torch.cat(made)
    if not experts.weighs_inputs:
        of_pairs *= by_pair
    of_rows = of_pairs.index_select(0, by_expert.argsort()).view(*chosen.shape, -1).sum(1)
    return of_rows if out is None else out.add_(of_rows)


def clamped(gate_up: Tensor, clamp: Clamp) -> Tensor:
    """Return (up + 1) * gate * sigmoid(slope * gate), both clamped before."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.slope))
