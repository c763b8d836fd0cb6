"""Sums, maxima and draws over rows of a vocabulary, read by blocks of columns, which touch each number once.

Every function works on each row by itself, so its result for a row does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WIDTH = 128  # columns of a block


def by_block(rows: Tensor, reduce: Callable[[Tensor], Tensor], width: int = WIDTH) -> Tensor:
    """Apply `reduce` block by block: [rows, columns] -> [rows, blocks]. The last block may be shorter."""
    whole = rows.shape[1] // width
    blocks = reduce(rows[:, : whole * width].unflatten(1, (whole, width))) if whole else None
    rest = reduce(rows[:, None, whole * width :]) if whole * width < rows.shape[1] else None
    return torch.cat([part for part in (blocks, rest) if part is not None], dim=1)


def maxima(rows: Tensor, width: int = WIDTH) -> Tensor:
    return by_block(rows, lambda block: block.amax(-1), width)


def sums(rows: Tensor) -> Tensor:
    """Return the sum of each row: blocks are added up in double precision, numbers within a block in the rows' own."""
    return by_block(rows, lambda block: block.sum(-1)).double()


def best(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest number of each row and its column, the first of equal ones; NaN where a row has a NaN."""
    largest, block = maxima(rows).max(-1)
    within = _of_block(rows, block, -torch.inf)
    return largest, block * WIDTH + within.max(-1).indices


def drawn(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return a column of each row by inverse transform: where the sum of weights passes `number` of the whole."""
    reached = sums(weights).cumsum(-1)
    target = numbers * reached[:, -1]
    block = place(reached, target)
    before = reached.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1).masked_fill(block == 0, 0.0)
    within = _of_block(weights, block, 0.0).double().cumsum(-1)
    return block * WIDTH + place(within, target - before)


def place(reached: Tensor, target: Tensor) -> Tensor:
    """Return where sums that grow along a row first exceed the target, at the latest where the last weight is added.

    A place with weight zero is never returned, whatever rounding has done to the target.
    """
    last = torch.searchsorted(reached, reached[:, -1:].contiguous())
    return torch.searchsorted(reached, target[:, None], right=True).minimum(last).squeeze(1)


def _of_block(rows: Tensor, block: Tensor, beyond: float) -> Tensor:
    """Return the columns of one block of each row; places beyond the last column read as `beyond`."""
    columns = block[:, None] * WIDTH + torch.arange(WIDTH, device=rows.device)
    inside = columns < rows.shape[1]
    return rows.gather(1, columns.clamp(max=rows.shape[1] - 1)).masked_fill(~inside, beyond)
