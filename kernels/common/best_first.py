"""Find the likeliest tokens of each row of logits, in order, without sorting whole rows.

Of equal logits the lower token comes first. All logits from a floor up are taken, so a logit that equals a taken logit
is taken too, and the order does not depend on the floor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alignedserve.kernels.common.row_blocks import WIDTH, maxima

_LEAST = torch.finfo(torch.float32).min  # impossible tokens (-inf) lie below


@dataclass(frozen=True)
class BestFirst:
    """The tokens of each row, [rows, longest row]; a shorter row repeats token 0 behind its `count`."""

    tokens: Tensor
    count: Tensor  # [rows]

    @property
    def places(self) -> Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    def pick(self, rows: Tensor) -> Tensor:
        """Return the numbers of `rows` at these tokens, and 0 behind the last token."""
        return rows.gather(1, self.tokens).masked_fill(self.places >= self.count[:, None], 0)


def best_first(logits: Tensor, floor: Tensor) -> BestFirst:
    """Return all possible tokens whose logit is at least `floor` [rows]."""
    row, token = (logits >= floor.clamp(min=_LEAST)[:, None]).nonzero(as_tuple=True)
    count = torch.bincount(row, minlength=len(logits))
    place = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    shape = (len(logits), max(1, int(count.max())))
    values = logits.new_full(shape, -torch.inf)
    tokens = row.new_zeros(shape)
    values[row, place], tokens[row, place] = logits[row, token], token
    order = torch.sort(values, dim=1, descending=True, stable=True).indices  # tokens already rise along a row
    return BestFirst(tokens.gather(1, order), count)


def floor_of_top(logits: Tensor, k: Tensor) -> Tensor:
    """Return [rows] a bound that each row's `k` largest logits reach and few others: the k-th largest block maximum."""
    most = int(k.max())
    width = WIDTH
    while width > 1 and logits.shape[1] < 4 * most * width:
        width //= 2
    of_blocks = maxima(logits, width)
    largest = of_blocks.topk(min(most, of_blocks.shape[1])).values
    return largest.gather(1, (k - 1).clamp(max=largest.shape[1] - 1)[:, None]).squeeze(1)
