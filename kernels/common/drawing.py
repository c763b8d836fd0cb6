"""A token of each row of logits, and log-probabilities: what they mean, in torch.

    greedy          the largest logit; of equal ones the lowest token
    temperature, min_p
    top_k, top_p    over tokens by falling logit, of equal ones the lower first (best_first.py)
    the draw        by inverse transform: in that order where there is a top_k or top_p, else by token

Every row is computed by itself. None is sorted whole: top-k and top-p look only at tokens that are likely enough to
be kept. On a GPU this waits for it more than once; triton_sampling.py, which draws the same, never does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import torch

from alignedserve.kernels.common.best_first import best_first, floor_of_top
from alignedserve.kernels.common.row_blocks import best, drawn, place, sums

NONE = -1  # in the place of a token: none is possible, or the logits are not finite
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-30, 1e38  # beyond them fp32 has no other numbers
_LIKELY = (1e-3, 1e-5)  # probabilities from which on a top-p looks for its tokens, first and second


class Wish(Protocol):
    """How the token of a row is to be drawn."""

    @property
    def temperature(self) -> float:
        """0: the likeliest, and nothing else counts."""

    @property
    def top_k(self) -> int:
        """0: no limit."""

    @property
    def top_p(self) -> float:
        """1: no limit."""

    @property
    def min_p(self) -> float:
        """0: no limit."""


class Likeliest(NamedTuple):
    """Log-probabilities, of one token of each row and of its likeliest."""

    of_token: torch.Tensor  # [rows]
    tokens: torch.Tensor  # [rows, most that any row asks for]; good up to the row's count, as `values` are
    values: torch.Tensor
    counts: torch.Tensor  # [rows]: what was asked for, or fewer where no more are possible


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """[rows]: the likeliest token of each; NONE where the largest logit is not finite, or one is no number."""
    largest, token = best(logits)
    return torch.where(largest.isfinite(), token, NONE)


def draw(
    logits: torch.Tensor,
    wishes: Sequence[Wish],
    numbers: Sequence[float],
    greedy: Callable[[torch.Tensor], torch.Tensor] = greedy,
) -> torch.Tensor:
    """[rows]: a token each, by its wish and a random number in [0, 1); the logits are changed on the way."""
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


def _drawn(
    logits: torch.Tensor, likeliest: torch.Tensor, wishes: Sequence[Wish], numbers: torch.Tensor
) -> torch.Tensor:
    """A token of each row, all of which are sampled; the logits are changed on the way."""
    temperatures = torch.tensor([wish.temperature for wish in wishes], dtype=torch.double)
    temperatures = temperatures.clamp(LEAST_TEMPERATURE, MOST_TEMPERATURE).to(logits)
    # Below the largest, so that no temperature, however low, overflows.
    logits.sub_(logits.gather(1, likeliest[:, None])).div_(temperatures[:, None])
    shares = logits.softmax(-1)
    largest = shares.gather(1, likeliest[:, None]).squeeze(1)
    _leave_out_unlikely(shares, largest, wishes)
    vocab_size = logits.shape[1]
    cut = [row for row, one in enumerate(wishes) if one.top_p < 1 or 0 < one.top_k < vocab_size]
    if not cut:
        return drawn(shares, numbers)
    top_k = torch.tensor([min(one.top_k or vocab_size, vocab_size) for one in wishes]).to(logits.device)
    top_p = torch.tensor([one.top_p for one in wishes], dtype=torch.double).to(logits.device)
    rows = _Rows(logits, shares, largest.double(), top_k, top_p, numbers)
    if len(cut) == len(wishes):
        return _drawn_of_best(rows)
    tokens = drawn(shares, numbers)
    at = torch.tensor(cut, device=logits.device)
    tokens[at] = _drawn_of_best(rows.at(at))
    return tokens


def _leave_out_unlikely(shares: torch.Tensor, largest: torch.Tensor, wishes: Sequence[Wish]) -> None:
    """min_p: nothing is left of what is too far below the likeliest."""
    least = [wish.min_p for wish in wishes]
    if any(least):
        shares.masked_fill_(shares < (torch.tensor(least).to(shares) * largest)[:, None], 0.0)


@dataclass(frozen=True)
class _Rows:
    """That are cut by top_k, top_p or both."""

    scaled: torch.Tensor  # [rows, vocabulary]: logits by temperature, the largest of which is 0
    shares: torch.Tensor  # [rows, vocabulary]: probabilities, without what min_p leaves out
    largest: torch.Tensor  # [rows]: of the shares
    top_k: torch.Tensor  # [rows]; the whole vocabulary where there is none
    top_p: torch.Tensor  # [rows]
    numbers: torch.Tensor  # [rows], random

    def at(self, rows: torch.Tensor) -> _Rows:
        return _Rows(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def has_top_k(self) -> torch.Tensor:
        return self.top_k < self.scaled.shape[1]

    def floor(self, share: float | None) -> torch.Tensor:
        """[rows]: tokens at or above it are looked at: for a top_k all that it can keep, else those with such a share.

        None is the share from which on nothing is missed: tokens below it have together less than top_p leaves out.
        """
        of_share = (1 - self.top_p) / (2 * self.scaled.shape[1]) if share is None else share
        by_share = (of_share / self.largest).log().to(self.scaled)
        if not self.has_top_k.any():
            return by_share
        most = int(self.top_k[self.has_top_k].max())
        return torch.where(self.has_top_k, floor_of_top(self.scaled, self.top_k.clamp(max=most)), by_share)

    @property
    def whole(self) -> torch.Tensor:
        """[rows]: the sum of the shares; 1, but for rounding and min_p."""
        return sums(self.shares).cumsum(-1)[:, -1]


def _drawn_of_best(rows: _Rows) -> torch.Tensor:
    """Where the tokens that were looked at do not make up top_p, more are."""
    tokens = torch.zeros_like(rows.top_k)
    left = torch.arange(len(tokens), device=tokens.device)
    for share in (*_LIKELY, None):
        of_left = rows if len(left) == len(tokens) else rows.at(left)
        tokens[left], enough = _drawn_above(of_left, of_left.floor(share))
        left = left[~enough]
        if not len(left):
            break
    return tokens


def _drawn_above(rows: _Rows, floor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row from those at or above its floor, and whether there were enough of them."""
    found = best_first(rows.scaled, floor)
    shares = found.pick(rows.shares).double().masked_fill(found.places >= rows.top_k[:, None], 0.0)
    reached = shares.cumsum(-1)
    by_top_k = rows.has_top_k
    whole = reached[:, -1] if by_top_k.all() else torch.where(by_top_k, reached[:, -1], rows.whole)
    # The smallest set that reaches top_p of the whole: a token is in it if those before it do not reach it.
    needed = torch.where(rows.top_p < 1, rows.top_p * whole, torch.inf)
    enough = by_top_k | (reached[:, -1] >= needed)
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    kept = shares.masked_fill(before >= needed[:, None], 0.0).cumsum(-1)
    chosen = place(kept, rows.numbers * kept[:, -1])
    return found.tokens.gather(1, chosen[:, None]).squeeze(1), enough


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> Likeliest:
    """Of `tokens` [rows], and of the likeliest `tops` of each row, of equal ones the lower first."""
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
