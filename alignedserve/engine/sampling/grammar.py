"""Grammars of outputs: before each token is sampled, a grammar says which tokens may come next.

A grammar is made from the request's choice (`core.Choice`) or syntax, and gets every token of the output in order. Its
state follows from these alone: on another worker it is made again and gets the tokens that were emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from alignedserve.core import Sampling
from alignedserve.errors import PlanError
from alignedserve.text.syntax import Syntaxes


class Grammar(Protocol):
    def advance(self, token: int) -> None:
        """Take the next token of the output."""

    def mask(self) -> Tensor | None:
        """Return [vocabulary] of bool: whether each token may come now; None if all may."""


def make_grammar(
    sampling: Sampling, stop_tokens: Sequence[int], vocab_size: int, syntaxes: Syntaxes | None
) -> ChoiceGrammar | TextGrammar | None:
    """Return the grammar of the request's answer before the first token; None without a grammar."""
    if sampling.grammar is not None:
        return ChoiceGrammar(sampling.grammar.outputs, stop_tokens, vocab_size)
    if not sampling.syntax:
        return None
    if syntaxes is None:
        raise PlanError("a request has a syntax, but the model has no tokenizer.json to follow it")
    return TextGrammar(sampling.syntax, syntaxes, stop_tokens, vocab_size)


class ChoiceGrammar:
    """Allows one of several outputs, and a stop token after it."""

    def __init__(self, outputs: Sequence[tuple[int, ...]], stop_tokens: Sequence[int], vocab_size: int) -> None:
        self._possible = [*outputs]  # the choices that begin like the output so far
        self._stop_tokens, self._vocab_size = stop_tokens, vocab_size
        self._num_tokens = 0  # of the output so far

    def advance(self, token: int) -> None:
        """Take the next token of the output."""
        at = self._num_tokens
        self._possible = [choice for choice in self._possible if len(choice) > at and choice[at] == token]
        self._num_tokens += 1

    def mask(self) -> Tensor:
        """Return [vocabulary] of bool: whether each token may come now."""
        at = self._num_tokens
        allowed = {choice[at] for choice in self._possible if len(choice) > at}
        if any(len(choice) == at for choice in self._possible):
            allowed |= set(self._stop_tokens)
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[list(allowed)] = True
        return mask


class TextGrammar:
    """Allows what a syntax allows, and a stop token wherever the text may end. After an error it allows no token."""

    def __init__(self, syntax: str, syntaxes: Syntaxes, stop_tokens: Sequence[int], vocab_size: int) -> None:
        self._template = syntaxes.template(syntax)  # kept, so that others who follow it meanwhile compile nothing
        self._matcher = self._template.matcher()
        self._stop_tokens, self._vocab_size = list(stop_tokens), vocab_size

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)

    def mask(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        may_end = self._matcher.is_accepting()
        allowed[self._stop_tokens] = may_end
        return torch.from_numpy(allowed)
