"""Draw a token from each row of logits, and compute log-probabilities, in torch: the reference for other kernels.

    greedy          the largest logit; of equal logits the lowest token
    temperature, min_p
    top_k, top_p    over tokens by falling logit, of equal logits the lower token first (best_first)
    the draw        by inverse transform: in that order where there is a top_k or top_p, else by token

Each row is computed by itself. No row is sorted whole: top-k and top-p look only at tokens that are likely enough to
be kept. On a GPU this waits for the device more than once; triton/sampling.py draws the same tokens and never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.core import Sampling

WIDTH = 128  # columns of a block
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


NONE = -1  # stands for a token where no token is possible or the logits are not finite
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-30, 1e38  # fp32 has no numbers beyond them
_LIKELY = (1e-3, 1e-5)  # the least probability that top-p looks at: first try, second try


def table_of(wishes: Sequence[Sampling], numbers: Sequence[float], columns: int) -> Tensor:
    """Return the wishes as kernels read them, [5, rows] on the CPU: temperature, top_k, top_p, min_p, random number.

    Where all rows are greedy, only the temperatures are right."""
    if all(wish.temperature <= 0 for wish in wishes):
        return torch.zeros(5, len(wishes), dtype=torch.double)
    of = [(_usual(wish.temperature), min(wish.top_k, columns), wish.top_p, wish.min_p) for wish in wishes]
    return torch.tensor([*zip(*of, strict=True), numbers], dtype=torch.double)


def _usual(temperature: float) -> float:
    return min(max(temperature, LEAST_TEMPERATURE), MOST_TEMPERATURE) if temperature > 0 else 0.0


class Likeliest(NamedTuple):
    """Log-probabilities of one token of each row and of the row's likeliest tokens."""

    of_token: Tensor  # [rows]
    tokens: Tensor  # [rows, most that any row asks for]; valid up to the row's count, as `values` are
    values: Tensor
    counts: Tensor  # [rows]: the number that was asked for, or fewer where fewer are possible


def greedy(logits: Tensor) -> Tensor:
    """Return [rows] the likeliest token of each row; NONE where the largest logit is not finite or a logit is NaN."""
    largest, token = best(logits)
    return torch.where(largest.isfinite(), token, NONE)


def draw(
    logits: Tensor, wishes: Sequence[Sampling], numbers: Sequence[float], greedy: Callable[[Tensor], Tensor] = greedy
) -> Tensor:
    """Return [rows] a token of each row, by its sampling and a random number in [0, 1); the logits are overwritten."""
    tokens = greedy(logits)
    if not any(wish.temperature > 0 for wish in wishes):
        return tokens
    rows = [row for row, token in enumerate(tokens.tolist()) if token != NONE and wishes[row].temperature > 0]
    if rows:
        at = torch.tensor(rows, device=logits.device)
        of_rows = logits if len(rows) == len(wishes) else logits[at]
        random = torch.tensor([numbers[row] for row in rows], dtype=torch.double, device=logits.device)
        tokens[at] = _drawn(of_rows, tokens[at], [wishes[row] for row in rows], random)
    return tokens


def _drawn(logits: Tensor, likeliest: Tensor, wishes: Sequence[Sampling], numbers: Tensor) -> Tensor:
    """Return a token of each row, where all rows are sampled; the logits are overwritten."""
    temperatures = torch.tensor([wish.temperature for wish in wishes], dtype=torch.double)
    temperatures = temperatures.clamp(LEAST_TEMPERATURE, MOST_TEMPERATURE).to(logits)
    # Relative to the largest logit, so that no low temperature overflows.
    logits.sub_(logits.gather(1, likeliest[:, None])).div_(temperatures[:, None])
    shares = logits.softmax(-1)
    largest = shares.gather(1, likeliest[:, None]).squeeze(1)
    _leave_out_unlikely(shares, largest, wishes)
    vocab_size = logits.shape[1]
    cut = [row for row, wish in enumerate(wishes) if wish.top_p < 1 or 0 < wish.top_k < vocab_size]
    if not cut:
        return drawn(shares, numbers)
    top_k = torch.tensor([min(wish.top_k or vocab_size, vocab_size) for wish in wishes]).to(logits.device)
    top_p = torch.tensor([wish.top_p for wish in wishes], dtype=torch.double).to(logits.device)
    rows = _CutRows(logits, shares, largest.double(), top_k, top_p, numbers)
    if len(cut) == len(wishes):
        return _drawn_of_best(rows)
    tokens = drawn(shares, numbers)
    at = torch.tensor(cut, device=logits.device)
    tokens[at] = _drawn_of_best(rows.at(at))
    return tokens


def _leave_out_unlikely(shares: Tensor, largest: Tensor, wishes: Sequence[Sampling]) -> None:
    """Apply min_p: set the share of tokens that are too far below the likeliest to zero."""
    least = [wish.min_p for wish in wishes]
    if any(least):
        shares.masked_fill_(shares < (torch.tensor(least).to(shares) * largest)[:, None], 0.0)


@dataclass(frozen=True)
class _CutRows:
    """The rows that top_k, top_p or both cut."""

    scaled: Tensor  # [rows, vocabulary]: logits by temperature; the largest is 0
    shares: Tensor  # [rows, vocabulary]: probabilities, without what min_p leaves out
    largest: Tensor  # [rows]: of the shares
    top_k: Tensor  # [rows]; the whole vocabulary where there is none
    top_p: Tensor  # [rows]
    numbers: Tensor  # [rows], random

    def at(self, rows: Tensor) -> _CutRows:
        return _CutRows(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def has_top_k(self) -> Tensor:
        return self.top_k < self.scaled.shape[1]

    def floor(self, share: float | None) -> Tensor:
        """Return [rows] the floor of the tokens to look at: all that a top_k can keep, else tokens with such a share.

        None takes the share at which nothing is missed: tokens below it have less together than top_p leaves out.
        """
        of_share = (1 - self.top_p) / (2 * self.scaled.shape[1]) if share is None else share
        by_share = (of_share / self.largest).log().to(self.scaled)
        if not self.has_top_k.any():
            return by_share
        most = int(self.top_k[self.has_top_k].max())
        return torch.where(self.has_top_k, floor_of_top(self.scaled, self.top_k.clamp(max=most)), by_share)

    @property
    def whole(self) -> Tensor:
        """Return [rows] the sum of the shares: 1, except for rounding and min_p."""
        return sums(self.shares).cumsum(-1)[:, -1]


def _drawn_of_best(rows: _CutRows) -> Tensor:
    """Return a token of each row; look at more tokens where the first look does not reach top_p."""
    tokens = torch.zeros_like(rows.top_k)
    left = torch.arange(len(tokens), device=tokens.device)
    for share in (*_LIKELY, None):
        of_left = rows if len(left) == len(tokens) else rows.at(left)
        tokens[left], enough = _drawn_above(of_left, of_left.floor(share))
        left = left[~enough]
        if not len(left):
            break
    return tokens


def _drawn_above(rows: _CutRows, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a token of each row from the tokens at or above its floor, and whether there were enough of them."""
    found = best_first(rows.scaled, floor)
    shares = found.pick(rows.shares).double().masked_fill(found.places >= rows.top_k[:, None], 0.0)
    reached = shares.cumsum(-1)
    by_top_k = rows.has_top_k
    whole = reached[:, -1] if by_top_k.all() else torch.where(by_top_k, reached[:, -1], rows.whole)
    # The smallest set that reaches top_p of the whole: a token is in it if the tokens before it do not reach top_p.
    needed = torch.where(rows.top_p < 1, rows.top_p * whole, torch.inf)
    enough = by_top_k | (reached[:, -1] >= needed)
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    kept = shares.masked_fill(before >= needed[:, None], 0.0).cumsum(-1)
    chosen = place(kept, rows.numbers * kept[:, -1])
    return found.tokens.gather(1, chosen[:, None]).squeeze(1), enough


def logprobs(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> Likeliest:
    """Return log-probabilities of `tokens` [rows] and of each row's likeliest `tops`, of equals the lower first."""
    whole = logits.logsumexp(-1, keepdim=True)
    of_token = (logits.gather(1, tokens.clamp(min=0)[:, None]) - whole).squeeze(1)
    width = min(max(tops, default=0), logits.shape[1])
    most = torch.tensor(tops, device=logits.device).clamp(max=logits.shape[1])
    if not width:
        nothing = tokens.new_empty((len(tokens), 0))
        return Likeliest(of_token, nothing, nothing.to(logits), most)
    found = best_first(logits, floor_of_top(logits, most.clamp(min=1)))
    values = (found.pick(logits) - whole)[:, :width]
    return Likeliest(of_token, found.tokens[:, :width], values, most.minimum(found.count))


# --- Sums, maxima and draws over rows, read by blocks of columns, which touch each number once


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
    """Return the largest number of each row and its column, the first of equal numbers; NaN where a row has a NaN."""
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
