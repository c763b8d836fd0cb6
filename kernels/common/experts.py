"""Mixtures of experts: which experts a token chooses, their weights for kernels that run all at once, and what these
kernels compute, in torch.

Each expert's weights stay where they were loaded. A kernel finds them by a table of addresses on the device, so it asks
nobody which experts a step has chosen:

    addresses   expert 0     expert 1     expert 2    ...
    up          0x7f...      0x7f...      0x7f...            each [2 * inner, hidden]: gate, then up
    up_bias     0            0            0                  0: there is none
    down        0x7f...      0x7f...      0x7f...            each [hidden, inner]
    down_bias   0            0            0
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from alignedserve.architectures.routing import Clamp, Routing, Scores
from alignedserve.kernels.common.linear import Linear

LEAST_SUM = 1e-20  # of shares, before they are divided by it


@dataclass(frozen=True)
class ExpertWeights:
    ups: Sequence[Linear]  # one of each expert: gate and up
    downs: Sequence[Linear]
    clamp: Clamp | None
    taken: int  # experts of a row
    weighs_inputs: bool  # whether a share is a factor of what an expert reads, not of what it makes

    @cached_property
    def addresses(self) -> Tensor:
        """Return int64 [4, experts], as drawn above, of experts of plain numbers, alike in shape, dtype and biases."""
        for layers in (self.ups, self.downs):
            if len({(layer.shape, layer.bias is None) for layer in layers}) != 1 or layers[0].packed:
                raise ValueError("experts that run at once must have weights alike")
        rows = [
            [0 if of is None else of.data_ptr() for of in column]
            for layers in (self.ups, self.downs)
            for column in ([layer.memory for layer in layers], [layer.bias for layer in layers])
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.ups[0].memory.device)

    def __len__(self) -> int:
        return len(self.ups)

    @property
    def kind(self) -> Hashable:
        """Return what layers have in common for which kernels are compiled and measured once."""
        layers = self.ups[0], self.downs[0]
        return len(self), self.taken, self.clamp, *((layer.shape, layer.bias is None) for layer in layers)

    @property
    def hidden(self) -> int:
        return self.downs[0].shape.out

    @property
    def inner(self) -> int:
        return self.downs[0].shape.inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.ups[0].shape.dtype


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
    x: Tensor, experts: ExpertWeights, chosen: Tensor, shares: Tensor, out: Tensor, silu_mul: Callable[[Tensor], Tensor]
) -> None:
    """Add to each row of `out` what its experts make of its row of x, one expert after another.

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
            made.append(down(silu_mul(both) if experts.clamp is None else clamped(both, experts.clamp)))
    of_pairs = torch.cat(made)
    if not experts.weighs_inputs:
        of_pairs *= by_pair
    out += of_pairs.index_select(0, by_expert.argsort()).view(*chosen.shape, -1).sum(1)


def clamped(gate_up: Tensor, clamp: Clamp) -> Tensor:
    """Return (up + 1) * gate * sigmoid(slope * gate), both clamped before."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.slope))
