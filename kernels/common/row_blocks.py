"""Rows over a vocabulary, read by blocks of columns: sums, maxima and places that touch each number once.

Every function works on each row by itself, so what it gives for a row does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WIDTH = 128  # columns of a block


def by_block(rows: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor], width: int = WIDTH) -> torch.Tensor:
    """`reduce` along the last dimension, block by block: [rows, columns] -> [rows, blocks]. The last may be shorter."""
    whole = rows.shape[1] // width
    blocks = reduce(rows[:, : whole * width].unflatten(1, (whole, width))) if whole else None
    rest = reduce(rows[:, None, whole * width :]) if whole * width < rows.shape[1] else None
    return torch.cat([part for part in (blocks, rest) if part is not None], dim=1)


def maxima(rows: torch.Tensor, width: int = WIDTH) -> torch.Tensor:
    return by_block(rows, lambda block: block.amax(-1), width)


def sums(rows: torch.Tensor) -> torch.Tensor:
    """In double precision where many are added up, in the rows' own within a block."""
    return by_block(rows, lambda block: block.sum(-1)).double()


def best(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest number of each row and its column, the first of equal ones; NaN where a row has one."""
    largest, block = maxima(rows).max(-1)
    within = _of_block(rows, block, -torch.inf)
    return largest, block * WIDTH + within.max(-1).indices


def drawn(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """A column of each row by inverse transform: the one at which the sum of weights passes `number` of the whole."""
    reached = sums(weights).cumsum(-1)
    target = numbers * reached[:, -1]
    block = place(reached, target)
    before = reached.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1).masked_fill(block == 0, 0.0)
    within = _of_block(weights, block, 0.0).double().cumsum(-1)
    return block * WIDTH + place(within, target - before)


def place(reached: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Where sums that grow along a row first exceed the target; at the latest where the last weight was added.

    A place with a weight of nothing is never the one, whatever rounding has done to the target.
    """
    last = torch.searchsorted(reached, reached[:, -1:].contiguous())
    return torch.searchsorted(reached, target[:, None], right=True).minimum(last).squeeze(1)


def _of_block(rows: torch.Tensor, block: torch.Tensor, beyond: float) -> torch.Tensor:
    """The columns of one block of each row; what lies beyond the last column reads as `beyond`."""
    columns = block[:, None] * WIDTH + torch.arange(WIDTH, device=rows.device)
    inside = columns < rows.shape[1]
    return rows.gather(1, columns.clamp(max=rows.shape[1] - 1)).masked_fill(~inside, beyond)
