"""Sample tokens from logits, for a whole batch at once, by a generator without state.

The random number of a token is a function of the request's seed and of the token's index in its output. So, given the
logits, the tokens of a request depend neither on the batch nor on moves, evictions or restarts: each row is computed by
itself, and tokens are drawn by inverse transform in an order that follows from the row alone. Limits, biases and
penalties come first (edits.py), then the steps of kernels/common/drawing.py.

Sampled tokens stay on the device until they are read: on a GPU, reading them is the first thing that waits for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

from alignedserve.core import History, Logprob, Sampling
from alignedserve.engine.sampling.edits import Edits, edit_logits
from alignedserve.kernels.common.drawing import NONE, Likeliest, table_of
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.threads import compute_alone
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.text.syntax import Syntaxes


class Turns:
    """Does the work of several callers in one thread, each in its turn: none waits for all that another has ordered."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name, initializer=compute_alone)  # starts with the first work
        self._lock = Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # by caller; the first one's turn is now

    def add(self, caller: str, work: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.setdefault(caller, deque()).append(work)
        self._thread.submit(self._next)

    def _next(self) -> None:
        with self._lock:
            caller, waiting = next(iter(self._waiting.items()))
            work = waiting.popleft()
        try:
            work()
        finally:
            with self._lock:
                del self._waiting[caller]
                if waiting:
                    self._waiting[caller] = waiting  # behind those who came meanwhile


_MASK = (1 << 64) - 1
REFERENCE: Kernels = Reference()
MUCH_S = 2e-4  # for the mask of a grammar: most take some tens of microseconds
_KEPT = 16  # steps that a request may sit out with its edits kept: four in pauses, four without documents, and more


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) for this token: two rounds of SplitMix64's finaliser over the counter."""
    return (_mix(_mix(seed & _MASK) + index) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class NextToken:
    """The next token of a request, which must be sampled."""

    sampling: Sampling
    index: int  # in the output
    request: str = ""
    history: History | None = None  # of a request with edited logits
    newest: int | None = None  # the token before it, if the output has one


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int | None  # None: no token is possible, or the logits are not finite
    logprob: Logprob | None = None  # if the sampling asks for it
    mask_s: float = 0.0  # that its grammar's mask took, where that is much


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that are still on the device, which may not have computed them yet."""

    tokens: Tensor  # [requests], NONE where no token is possible
    asked: Sequence[int] = ()  # the rows that ask for log-probabilities
    likeliest: Likeliest | None = None  # the log-probabilities of these rows
    masks: Mapping[int, float] = field(default_factory=dict)  # by row: what masks took that took much

    def read(self) -> list[SampledToken]:
        """Wait for the tokens and return them."""
        tokens = [None if token == NONE else token for token in self.tokens.tolist()]
        if self.likeliest is None and not self.masks:
            return [SampledToken(token) for token in tokens]
        logprobs = dict(zip(self.asked, _logprobs(self.likeliest), strict=True)) if self.likeliest is not None else {}
        return [
            SampledToken(token, logprobs.get(row) if token is not None else None, self.masks.get(row, 0.0))
            for row, token in enumerate(tokens)
        ]


_RowEdits: TypeAlias = dict[int, Edits]  # row of the logits -> its edits


class Sampler:
    """Samples tokens; it keeps the state of requests' edits from step to step."""

    def __init__(self, vocab_size: int, syntaxes: Syntaxes | None = None, kernels: Kernels = REFERENCE) -> None:
        self._vocab_size, self._syntaxes, self._kernels = vocab_size, syntaxes, kernels
        self._edits: dict[str, tuple[Edits, int]] = {}  # of requests, and the number of the last step with them
        self._num_steps = 0
        self._thread = ThreadPoolExecutor(1, "syntax", initializer=compute_alone)  # starts with what is first asked
        # The syntaxes that are followed for a step, and for one in its pause: by the id of what is wanted.
        self._coming: dict[int, tuple[Sequence[NextToken], Future[_RowEdits]]] = {}
        self._turns = Turns("preparing")
        if syntaxes is not None:
            self._thread.submit(syntaxes.load)

    def prepare(self, sampling: Sampling, caller: str, ready: Callable[[], None]) -> None:
        """Compile a syntax beside the steps, and call `ready` then. What is wrong with it shows in its first step.

        It is kept for as long as the sampling exists, and not compiled if that has gone when it is its turn."""
        wanted = weakref.ref(sampling)
        del sampling

        def work() -> None:
            try:
                sampling = wanted()
                if self._syntaxes is not None and sampling is not None:
                    self._syntaxes.prepare(sampling.syntax, sampling)
            finally:
                ready()

        self._turns.add(caller, work)

    def begin(self, wanted: Sequence[NextToken]) -> None:
        """Prepare to sample these tokens: a thread follows their syntaxes while logits are computed."""
        wait([following for _, following in self._coming.values()])
        while len(self._coming) > 1:  # a step was broken off
            del self._coming[next(iter(self._coming))]
        if any(token.sampling.syntax for token in wanted):
            self._coming[id(wanted)] = wanted, self._thread.submit(self._follow, wanted)

    def sample(self, logits: Tensor, wanted: Sequence[NextToken]) -> list[SampledToken]:
        """Sample a token from each row of `logits` [requests, vocabulary]; this changes the logits."""
        return self.draw(logits, wanted).read()

    def table(self, wanted: Sequence[NextToken]) -> Tensor | None:
        """Return the table by which a captured step draws these tokens, or None where it cannot: it edits no logits,
        and has no log-probabilities."""
        if not wanted or any(token.history is not None or token.sampling.logprobs is not None for token in wanted):
            return None
        return table_of([token.sampling for token in wanted], _numbers(wanted), self._vocab_size)

    def draw(self, logits: Tensor, wanted: Sequence[NextToken]) -> Drawn:
        """Sample like `sample`, but without waiting for the device."""
        asked = [row for row, token in enumerate(wanted) if token.sampling.logprobs is not None]
        rows = on_device(torch.tensor(asked), logits.device) if asked else None
        raw = logits.index_select(0, rows) if rows is not None else None
        masks = self._edit(logits, wanted)
        tokens = self._kernels.draw(logits, [token.sampling for token in wanted], _numbers(wanted))
        if rows is None or raw is None:
            return Drawn(tokens, masks=masks)
        tops = [wanted[row].sampling.logprobs or 0 for row in asked]
        return Drawn(tokens, asked, self._kernels.logprobs(raw, tokens.index_select(0, rows), tops), masks)

    def drawn(self, tokens: Tensor, wanted: Sequence[NextToken]) -> Drawn:
        """Return the tokens that a captured step has drawn by `table`: a step that others' edits sit out."""
        self._follow(wanted)
        return Drawn(tokens)

    def score(self, logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
        """Return the log-probability of each row's token, and of the row's `top` likeliest tokens."""
        if not tokens:
            return []
        of_tokens = on_device(torch.tensor(tokens), logits.device)
        return _logprobs(self._kernels.logprobs(logits, of_tokens, [top] * len(tokens)))

    def _edit(self, logits: Tensor, wanted: Sequence[NextToken]) -> Mapping[int, float]:
        """Edit the logits, and return what masks took that took much."""
        coming = self._coming.pop(id(wanted), None)
        if edits := self._follow(wanted) if coming is None else coming[1].result():
            edit_logits(logits, [*edits], [*edits.values()], self._kernels)
        return {row: kept.mask_s for row, kept in edits.items() if kept.mask_s > MUCH_S}

    @torch.inference_mode()
    def _follow(self, wanted: Sequence[NextToken]) -> _RowEdits:
        self._num_steps = number = self._num_steps + 1
        found: _RowEdits = {}
        for row, token in enumerate(wanted):
            if token.history is not None:
                known, _ = self._edits.pop(token.request, (None, 0))  # half-way out of memory: they are made again
                found[row] = edits = self._update_edits(token, token.history, known)
                self._edits[token.request] = edits, number
        self._edits = {request: kept for request, kept in self._edits.items() if kept[1] + _KEPT >= number}
        return found

    def _update_edits(self, token: NextToken, history: History, known: Edits | None) -> Edits:
        if known is None or known.history is not history or not known.follow(token.index, token.newest):
            known = Edits(token.sampling, history, self._vocab_size, self._syntaxes)
            known.follow(token.index, token.newest)
        return known


def _numbers(wanted: Sequence[NextToken]) -> list[float]:
    return [uniform(of.sampling.seed, of.index) if of.sampling.temperature > 0 else 0.0 for of in wanted]


def _logprobs(likeliest: Likeliest) -> list[Logprob]:
    values, tokens, of_tokens, counts = (part.tolist() for part in likeliest)
    rows = zip(values, tokens, of_tokens, counts, strict=True)
    return [Logprob(value, tuple(zip(row[:count], of_row[:count], strict=True))) for value, row, of_row, count in rows]
