"""What changes logits before a token is chosen from them: limits, biases and penalties, for many requests at once.

    grammar, allowed tokens     what may not come gets -inf
    logit bias                  added
    repetition penalty          of tokens in prompt or output: a logit above 0 is divided by it, one below multiplied
    frequency, presence         subtracted for each time a token is in the output, and once if it is
    min_tokens                  stop tokens get -inf until the output has so many

In this order, which is vLLM's. They depend on the request's tokens, of which a step brings one: so what is known of
a request is kept from step to step, in the place of its `History`, and made anew from that where it is not. On a GPU
what is known goes there, and nothing is read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from alignedserve.core import History, Sampling
from alignedserve.engine.sampling.grammar import grammar_of
from alignedserve.kernels.common.placing import on_device
from alignedserve.text.syntax import Syntaxes

# Beyond them a repetition penalty makes infinities, or no numbers at all, of logits in fp32.
_LEAST_REPETITION, _MOST_REPETITION = 1e-30, 1e30


class Edits:
    """Of one request: what its next logits are to be changed by."""

    def __init__(self, sampling: Sampling, history: History, vocab_size: int, syntaxes: Syntaxes | None = None) -> None:
        self.sampling, self.history = sampling, history
        stop_tokens = [token for token in history.stop_tokens if token < vocab_size]
        self.seen = _Seen(history.prompt if sampling.repetition_penalty != 1 else ()) if sampling.penalises else None
        self.bias_tokens = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.long)
        self.bias = torch.tensor([bias for _, bias in sampling.logit_bias])
        self.stop_tokens = torch.tensor(stop_tokens, dtype=torch.long)
        self._allowed = _mask(sampling.allowed_tokens, vocab_size) if sampling.allowed_tokens else None
        self._grammar = grammar_of(sampling, stop_tokens, vocab_size, syntaxes)
        self._by_grammar: torch.Tensor | None = None  # what it lets come now
        self._num_told = 0  # tokens of the output that this knows of

    def follow(self, index: int, newest: int | None) -> bool:
        """Up to the token at `index`, which is to be sampled; False where this has gone further.

        `newest` is the token before it, where the step before has sampled it: the history may not have it yet.
        """
        if self._num_told > index:
            return False
        new = [*self.history.output[self._num_told : index]]
        if self._num_told + len(new) < index and newest is not None:
            new.append(newest)
        for token in new:
            if self.seen is not None:
                self.seen.add(token)
            if self._grammar is not None:
                self._grammar.advance(token)
        self._num_told += len(new)
        if self._grammar is not None and (new or self._by_grammar is None):
            self._by_grammar = self._grammar.mask()
        return True

    @property
    def mask(self) -> torch.Tensor | None:
        """[vocabulary]: whether a token may come, where there is a limit."""
        if self._by_grammar is None:
            return self._allowed
        return self._by_grammar if self._allowed is None else self._by_grammar & self._allowed

    @property
    def holds_back_stops(self) -> bool:
        return self._num_told < self.sampling.min_tokens


class _Seen:
    """The tokens of a request, each once, and how often its output has each."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._room = torch.zeros(2, 2 * len(self._places) + 64, dtype=torch.long)
        self._room[0, : len(self._places)] = torch.tensor([*self._places], dtype=torch.long)

    @property
    def tokens(self) -> torch.Tensor:
        return self._room[0, : len(self._places)]

    @property
    def counts(self) -> torch.Tensor:
        return self._room[1, : len(self._places)]

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == self._room.shape[1]:
            self._room = torch.cat([self._room, torch.zeros_like(self._room)], dim=1)
        self._room[0, place] = token
        self._room[1, place] += 1


def edit(logits: torch.Tensor, rows: Sequence[int], edits: Sequence[Edits]) -> None:
    """In place: each of `rows` by its own."""
    both = [*zip(rows, edits, strict=True)]
    for row, one in both:
        if (mask := one.mask) is not None:
            logits[row].masked_fill_(~on_device(mask, logits.device), -torch.inf)
    flat = logits.view(-1)
    if biased := [(row, one) for row, one in both if len(one.bias)]:
        at, _ = _places(logits, [(row, one.bias_tokens) for row, one in biased])
        flat.index_add_(0, at, _with(logits, torch.cat([one.bias for _, one in biased])))
    if penalised := [(row, one.seen, one.sampling) for row, one in both if one.seen is not None]:
        at, of = _places(logits, [(row, seen.tokens) for row, seen, _ in penalised])
        counts = _with(logits, torch.cat([seen.counts for _, seen, _ in penalised]))
        flat[at] = _penalised(flat[at], counts, [sampling for *_, sampling in penalised], of)
    if held_back := [(row, one.stop_tokens) for row, one in both if one.holds_back_stops]:
        flat.index_fill_(0, _places(logits, held_back)[0], -torch.inf)


def _penalised(
    values: torch.Tensor, counts: torch.Tensor, samplings: Sequence[Sampling], of: torch.Tensor
) -> torch.Tensor:
    """`of` says whose each value is, and `counts` how often the output has its token."""

    def each(penalties: list[float]) -> torch.Tensor:
        return _with(values, torch.tensor(penalties))[of]

    repetition = each([sampling.repetition_penalty for sampling in samplings])
    repetition.clamp_(_LEAST_REPETITION, _MOST_REPETITION)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= each([sampling.frequency_penalty for sampling in samplings]) * counts
    return values - each([sampling.presence_penalty for sampling in samplings]) * (counts > 0)


def _places(logits: torch.Tensor, of: Sequence[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each (row, its tokens): where the logits of all lie, one row after the other, and whose each is."""
    lengths = torch.tensor([len(tokens) for _, tokens in of])
    whose = torch.arange(len(of)).repeat_interleave(lengths)
    starts = torch.tensor([row * logits.shape[1] for row, _ in of])
    at = torch.cat([tokens for _, tokens in of]) + starts[whose]
    return on_device(at, logits.device), on_device(whose, logits.device)


def _with(these: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The numbers as these are: of their dtype, and on their device without waiting for it."""
    return on_device(numbers.to(these.dtype), these.device)


def _mask(tokens: Sequence[int], vocab_size: int) -> torch.Tensor:
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[list(tokens)] = True
    return mask
