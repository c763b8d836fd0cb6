"""From logits to tokens, for a whole batch at once, by a generator that has no state.

The random number of a token is a function of the request's seed and of the token's index in its
output. So, given its logits, what a request samples depends neither on the batch it runs in nor on
how often it was moved, evicted or restarted: every row is computed by itself, and tokens are drawn by inverse
transform in an order that follows from the row alone.

    edits           limits, biases and penalties (edits.py)
    greedy          the largest logit; of equal ones the lowest token
    temperature, min_p
    top_k, top_p    over tokens by falling logit, of equal ones the lower first (best_first.py)
    the draw        in that order where there is a top_k or top_p, else by token

No row is sorted whole: top-k and top-p look only at tokens that are likely enough to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch

from alignedserve.core import History, Logprob, Sampling
from alignedserve.engine.best_first import best_first, floor_of_top
from alignedserve.engine.blocks import best, drawn, place, sums
from alignedserve.engine.edits import Edits, edit
from alignedserve.kernels.threads import compute_alone
from alignedserve.syntax import Syntaxes

_MASK = (1 << 64) - 1
_LIKELY = (1e-3, 1e-5)  # probabilities from which on a top-p looks for its tokens, first and second
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-30, 1e38  # beyond them fp32 has no other numbers


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for this token: two rounds of SplitMix64's finaliser over the counter."""
    return (_mixed(_mixed(seed & _MASK) + index) >> 11) * 2.0**-53


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The next token of a request."""

    sampling: Sampling
    index: int  # in its output
    request: str = ""
    history: History | None = None  # where its sampling edits logits
    newest: int | None = None  # the token before it, where the output has one


@dataclass(frozen=True, slots=True)
class Chosen:
    token: int | None  # None: none is possible, or the logits are not finite
    logprob: Logprob | None = None  # where the sampling asks for it


_Rowed: TypeAlias = dict[int, Edits]  # by the row of the logits


class Sampler:
    """Keeps, from one step to the next, what the edits of requests know of their histories."""

    def __init__(self, vocab_size: int, syntaxes: Syntaxes | None = None) -> None:
        self._vocab_size, self._syntaxes = vocab_size, syntaxes
        self._edits: dict[str, Edits] = {}  # of the requests of the last step
        self._thread = ThreadPoolExecutor(1, "syntax", initializer=compute_alone)  # starts with what is first asked
        self._coming: tuple[Sequence[Wanted], Future[_Rowed]] | None = None
        if syntaxes is not None:
            self._thread.submit(syntaxes.load)

    def begin(self, wanted: Sequence[Wanted]) -> None:
        """What `sample` will be asked for: syntaxes are followed, in a thread, while logits are computed."""
        if self._coming is not None:  # of a step that broke off
            wait([self._coming[1]])
        follows = any(one.sampling.syntax for one in wanted)
        self._coming = (wanted, self._thread.submit(self._followed, wanted)) if follows else None

    def sample(self, logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[Chosen]:
        """For each row of `logits` [requests, vocabulary], which is changed on the way."""
        asked = [row for row, one in enumerate(wanted) if one.sampling.logprobs is not None]
        raw = logits[asked] if asked else None
        self._edit(logits, wanted)
        tokens = choose(logits, [(one.sampling, one.index) for one in wanted])
        if raw is None:
            return [Chosen(token) for token in tokens]
        tops = [wanted[row].sampling.logprobs or 0 for row in asked]
        told = dict(zip(asked, logprobs_of(raw, [tokens[row] or 0 for row in asked], tops), strict=True))
        return [Chosen(token, told.get(row) if token is not None else None) for row, token in enumerate(tokens)]

    def _edit(self, logits: torch.Tensor, wanted: Sequence[Wanted]) -> None:
        coming, self._coming = self._coming, None
        begun = coming is not None and coming[0] is wanted
        edits = coming[1].result() if coming is not None and begun else self._followed(wanted)
        if edits:
            edit(logits, [*edits], [*edits.values()])

    @torch.inference_mode()
    def _followed(self, wanted: Sequence[Wanted]) -> _Rowed:
        before, self._edits = self._edits, {}  # one that finds too little memory half-way is made anew
        edits = {
            row: self._edits_of(one, one.history, before.get(one.request))
            for row, one in enumerate(wanted)
            if one.history is not None
        }
        self._edits = {wanted[row].request: one for row, one in edits.items()}
        return edits

    def _edits_of(self, one: Wanted, history: History, known: Edits | None) -> Edits:
        if known is None or known.history is not history or not known.follow(one.index, one.newest):
            known = Edits(one.sampling, history, self._vocab_size, self._syntaxes)
            known.follow(one.index, one.newest)
        return known


def choose(logits: torch.Tensor, wanted: Sequence[tuple[Sampling, int]]) -> list[int | None]:
    """The token of each row by its sampling and its index, edits left aside; None where nothing is possible."""
    largest, greedy = best(logits)
    usable = largest.isfinite().tolist()
    tokens: list[int | None] = [token if use else None for token, use in zip(greedy.tolist(), usable, strict=True)]
    rows = [row for row, (sampling, _) in enumerate(wanted) if sampling.temperature > 0 and usable[row]]
    if rows:
        samplings = [wanted[row][0] for row in rows]
        numbers = torch.tensor([uniform(wanted[row][0].seed, wanted[row][1]) for row in rows], dtype=torch.double)
        of_rows = logits if len(rows) == len(wanted) else logits[rows]
        drawn_tokens = _drawn(of_rows, greedy[rows], samplings, numbers.to(logits.device))
        for row, token in zip(rows, drawn_tokens.tolist(), strict=True):
            tokens[row] = token
    return tokens


def _drawn(
    logits: torch.Tensor, likeliest: torch.Tensor, samplings: Sequence[Sampling], numbers: torch.Tensor
) -> torch.Tensor:
    """A token of each row, all of which are sampled; the logits are changed on the way."""
    temperatures = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.double)
    temperatures = temperatures.clamp(_LEAST_TEMPERATURE, _MOST_TEMPERATURE).to(logits)
    # Below the largest, so that no temperature, however low, overflows.
    logits.sub_(logits.gather(1, likeliest[:, None])).div_(temperatures[:, None])
    shares = logits.softmax(-1)
    largest = shares.gather(1, likeliest[:, None]).squeeze(1)
    _leave_out_unlikely(shares, largest, samplings)
    vocab_size = logits.shape[1]
    cut = [row for row, one in enumerate(samplings) if one.top_p < 1 or 0 < one.top_k < vocab_size]
    if not cut:
        return drawn(shares, numbers)
    top_k = torch.tensor([min(one.top_k or vocab_size, vocab_size) for one in samplings]).to(logits.device)
    top_p = torch.tensor([one.top_p for one in samplings], dtype=torch.double).to(logits.device)
    rows = _Rows(logits, shares, largest.double(), top_k, top_p, numbers)
    if len(cut) == len(samplings):
        return _drawn_of_best(rows)
    tokens = drawn(shares, numbers)
    at = torch.tensor(cut, device=logits.device)
    tokens[at] = _drawn_of_best(rows.at(at))
    return tokens


def _leave_out_unlikely(shares: torch.Tensor, largest: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """min_p: nothing is left of what is too far below the likeliest."""
    least = [sampling.min_p for sampling in samplings]
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


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[Logprob]:
    """Of one token of each row, and of the likeliest `tops` of it; `logits` as the model has them."""
    if not tokens:
        return []
    whole = logits.logsumexp(-1, keepdim=True)
    values = (logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]) - whole).squeeze(1).tolist()
    most = torch.tensor(tops, device=logits.device).clamp(max=logits.shape[1])
    if not most.any():
        return [Logprob(value) for value in values]
    found = best_first(logits, floor_of_top(logits, most.clamp(min=1)))
    width, counts = int(most.max()), most.minimum(found.count).tolist()
    likeliest = zip(
        found.tokens[:, :width].tolist(), (found.pick(logits) - whole)[:, :width].tolist(), counts, strict=True
    )
    tables = [tuple(zip(row[:count], of_row[:count], strict=True)) for row, of_row, count in likeliest]
    return [Logprob(value, table) for value, table in zip(values, tables, strict=True)]
