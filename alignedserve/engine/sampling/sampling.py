"""From logits to tokens, for a whole batch at once, by a generator that has no state.

The random number of a token is a function of the request's seed and of the token's index in its
output. So, given its logits, what a request samples depends neither on the batch it runs in nor on
how often it was moved, evicted or restarted: every row is computed by itself, and tokens are drawn by inverse
transform in an order that follows from the row alone. First come limits, biases and penalties (edits.py), then what
kernels/common/drawing.py says.

What is sampled stays on the device until it is read: on a GPU that is the first thing that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeAlias

import torch

from alignedserve.core import History, Logprob, Sampling
from alignedserve.engine.sampling.edits import Edits, edit
from alignedserve.kernels.common.drawing import NONE, Likeliest
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.threads import compute_alone
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.text.syntax import Syntaxes

_MASK = (1 << 64) - 1
REFERENCE: Kernels = Reference()


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


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that are on the device still, as those of a step that it computes."""

    tokens: torch.Tensor  # [requests], NONE where there is none
    asked: Sequence[int] = ()  # the rows that ask for log-probabilities
    likeliest: Likeliest | None = None  # theirs

    def read(self) -> list[Chosen]:
        """Waits for them."""
        tokens = _tokens_of(self.tokens.tolist())
        if self.likeliest is None:
            return [Chosen(token) for token in tokens]
        told = dict(zip(self.asked, _told(self.likeliest), strict=True))
        return [Chosen(token, told.get(row) if token is not None else None) for row, token in enumerate(tokens)]


_Rowed: TypeAlias = dict[int, Edits]  # by the row of the logits


class Sampler:
    """Keeps, from one step to the next, what the edits of requests know of their histories."""

    def __init__(self, vocab_size: int, syntaxes: Syntaxes | None = None, kernels: Kernels = REFERENCE) -> None:
        self._vocab_size, self._syntaxes, self._kernels = vocab_size, syntaxes, kernels
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
        return self.draw(logits, wanted).read()

    def draw(self, logits: torch.Tensor, wanted: Sequence[Wanted]) -> Drawn:
        """The same, without waiting for the device."""
        asked = [row for row, one in enumerate(wanted) if one.sampling.logprobs is not None]
        rows = on_device(torch.tensor(asked), logits.device) if asked else None
        raw = logits.index_select(0, rows) if rows is not None else None
        self._edit(logits, wanted)
        tokens = _drawn(logits, [(one.sampling, one.index) for one in wanted], self._kernels)
        if rows is None or raw is None:
            return Drawn(tokens)
        tops = [wanted[row].sampling.logprobs or 0 for row in asked]
        return Drawn(tokens, asked, self._kernels.logprobs(raw, tokens.index_select(0, rows), tops))

    def score(self, logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
        """Of one token of each row, and of the likeliest `top` of each."""
        return logprobs_of(logits, tokens, [top] * len(tokens), self._kernels)

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


def choose(
    logits: torch.Tensor, wanted: Sequence[tuple[Sampling, int]], kernels: Kernels = REFERENCE
) -> list[int | None]:
    """The token of each row by its sampling and its index, edits left aside; None where nothing is possible."""
    return _tokens_of(_drawn(logits, wanted, kernels).tolist())


def _drawn(logits: torch.Tensor, wanted: Sequence[tuple[Sampling, int]], kernels: Kernels) -> torch.Tensor:
    numbers = [uniform(sampling.seed, index) if sampling.temperature > 0 else 0.0 for sampling, index in wanted]
    return kernels.draw(logits, [sampling for sampling, _ in wanted], numbers)


def _tokens_of(drawn: Sequence[int]) -> list[int | None]:
    return [None if token == NONE else token for token in drawn]


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], tops: Sequence[int], kernels: Kernels = REFERENCE
) -> list[Logprob]:
    """Of one token of each row, and of the likeliest `tops` of it; `logits` as the model has them."""
    if not tokens:
        return []
    return _told(kernels.logprobs(logits, on_device(torch.tensor(tokens), logits.device), tops))


def _told(likeliest: Likeliest) -> list[Logprob]:
    values, tokens, of_tokens, counts = (part.tolist() for part in likeliest)
    rows = zip(values, tokens, of_tokens, counts, strict=True)
    return [Logprob(value, tuple(zip(row[:count], of_row[:count], strict=True))) for value, row, of_row, count in rows]
