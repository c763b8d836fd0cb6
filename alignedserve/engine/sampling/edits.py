"""Edit logits before a token is chosen from them: limits, biases and penalties, for many requests at once.

    grammar, allowed tokens,
    budget of reasoning         a token that may not come gets -inf
    logit bias                  added
    repetition penalty          for tokens in prompt or output: divides a logit above 0, multiplies a logit below 0
    frequency, presence         subtracted for each time that a token is in the output; subtracted once if it is there
    min_tokens                  stop tokens get -inf until the output has this number of tokens

The order is vLLM's. Edits depend on all tokens of the request, and a step adds a single token. So the state of a
request's edits is kept from step to step, and made again from `History` where the state is missing. On a GPU the state
is copied to the device, and nothing is read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from time import thread_time

import torch
from torch import Tensor

from alignedserve.core import History, Sampling
from alignedserve.engine.sampling.grammar import AfterReasoning, Grammar, make_grammar
from alignedserve.errors import PlanError
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.text.syntax import Syntaxes
from alignedserve.text.token_sets import unpack_tokens

# Outside these bounds a repetition penalty turns logits in fp32 into infinities or NaN.
_LEAST_REPETITION, _MOST_REPETITION = 1e-30, 1e30


class Edits:
    """The edits of a request's next logits."""

    def __init__(self, sampling: Sampling, history: History, vocab_size: int, syntaxes: Syntaxes | None = None) -> None:
        self.sampling, self.history = sampling, history
        stop_tokens = [token for token in history.stop_tokens if token < vocab_size]
        self.seen = _Seen(history.prompt if sampling.repetition_penalty != 1 else ()) if sampling.penalises else None
        self.bias_tokens = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.long)
        self.bias = torch.tensor([bias for _, bias in sampling.logit_bias])
        self.stop_tokens = torch.tensor(stop_tokens, dtype=torch.long)
        packed = sampling.allowed_tokens
        self._allowed = torch.from_numpy(unpack_tokens(packed, vocab_size)) if packed else None
        self._grammar = _make_grammar(sampling, stop_tokens, vocab_size, syntaxes)
        self._by_grammar: Tensor | None = None  # the mask of the grammar now
        self.mask_s = 0.0  # of a processor, that it took
        self._num_followed = 0  # tokens of the output that are taken into account

    def follow(self, index: int, newest: int | None) -> bool:
        """Take all tokens before `index` into account, where the next token is sampled; False if that went further.

        `newest` is the token just before, if the step before sampled it: the history may not have it yet.
        """
        if self._num_followed > index:
            return False
        began = thread_time()
        new = [*self.history.output[self._num_followed : index]]
        if self._num_followed + len(new) < index and newest is not None:
            new.append(newest)
        for token in new:
            if self.seen is not None:
                self.seen.add(token)
            if self._grammar is not None:
                self._grammar.advance(token)
        self._num_followed += len(new)
        if self._grammar is not None and (new or self._by_grammar is None):
            self._by_grammar = self._grammar.mask()
            self.mask_s = thread_time() - began
        return True

    @property
    def mask(self) -> Tensor | None:
        """Return whether each token of the vocabulary may come; None if there is no limit."""
        if self._by_grammar is None:
            return self._allowed
        return self._by_grammar if self._allowed is None else self._by_grammar & self._allowed

    @property
    def holds_back_stops(self) -> bool:
        return self._num_followed < self.sampling.min_tokens


def _make_grammar(
    sampling: Sampling, stop_tokens: Sequence[int], vocab_size: int, syntaxes: Syntaxes | None
) -> Grammar | None:
    make = partial(make_grammar, sampling, stop_tokens, vocab_size, syntaxes)
    if sampling.reasoning is None:
        return make()
    if syntaxes is None:
        raise PlanError("a request has a budget or a form beside reasoning, but the model has no tokenizer.json")
    return AfterReasoning(sampling.reasoning, make, syntaxes.bytes_of, stop_tokens, vocab_size)


class _Seen:
    """The distinct tokens of a request, and how often each is in the output."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._room = torch.zeros(2, 2 * len(self._places) + 64, dtype=torch.long)
        self._room[0, : len(self._places)] = torch.tensor([*self._places], dtype=torch.long)

    @property
    def tokens(self) -> Tensor:
        return self._room[0, : len(self._places)]

    @property
    def counts(self) -> Tensor:
        return self._room[1, : len(self._places)]

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == self._room.shape[1]:
            self._room = torch.cat([self._room, torch.zeros_like(self._room)], dim=1)
        self._room[0, place] = token
        self._room[1, place] += 1


def edit_logits(logits: Tensor, rows: Sequence[int], edits: Sequence[Edits], kernels: Kernels) -> None:
    """Edit each of these rows in place by the edits of its request."""
    edited = [*zip(rows, edits, strict=True)]
    if masks := {row: mask for row, edit in edited if (mask := edit.mask) is not None}:
        kernels.allow(logits, [*masks], [*masks.values()])
    flat = logits.view(-1)
    if biased := [(row, edit) for row, edit in edited if len(edit.bias)]:
        at, _ = _places(logits, [(row, edit.bias_tokens) for row, edit in biased])
        flat.index_add_(0, at, _like(logits, torch.cat([edit.bias for _, edit in biased])))
    if penalised := [(row, edit.seen, edit.sampling) for row, edit in edited if edit.seen is not None]:
        at, group = _places(logits, [(row, seen.tokens) for row, seen, _ in penalised])
        counts = _like(logits, torch.cat([seen.counts for _, seen, _ in penalised]))
        flat[at] = _penalise(flat[at], counts, [sampling for *_, sampling in penalised], group)
    if held_back := [(row, edit.stop_tokens) for row, edit in edited if edit.holds_back_stops]:
        flat.index_fill_(0, _places(logits, held_back)[0], -torch.inf)


def _penalise(values: Tensor, counts: Tensor, samplings: Sequence[Sampling], group: Tensor) -> Tensor:
    """Return the penalised values: `group` is the number of a value's sampling."""

    def each(penalties: list[float]) -> Tensor:
        return _like(values, torch.tensor(penalties))[group]

    repetition = each([sampling.repetition_penalty for sampling in samplings])
    repetition.clamp_(_LEAST_REPETITION, _MOST_REPETITION)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= each([sampling.frequency_penalty for sampling in samplings]) * counts
    return values - each([sampling.presence_penalty for sampling in samplings]) * (counts > 0)


def _places(logits: Tensor, groups: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the places of the logits of all groups (row, tokens), group after group, and the group of each place."""
    lengths = torch.tensor([len(tokens) for _, tokens in groups])
    group = torch.arange(len(groups)).repeat_interleave(lengths)
    starts = torch.tensor([row * logits.shape[1] for row, _ in groups])
    at = torch.cat([tokens for _, tokens in groups]) + starts[group]
    return on_device(at, logits.device), on_device(group, logits.device)


def _like(values: Tensor, numbers: Tensor) -> Tensor:
    """Return the numbers with the dtype of the values and on their device, without waiting for the device."""
    return on_device(numbers.to(values.dtype), values.device)
