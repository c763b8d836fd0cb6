"""Grammars: which tokens may come next, asked before each token is sampled.

A grammar is made of what the request says of it (`core.Choice`, or a syntax) and is told every token of the output, in
order.
It keeps no more than follows from these: on another worker it is made anew and told what was emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from alignedserve.core import Sampling
from alignedserve.errors import PlanError
from alignedserve.text.syntax import Syntaxes


class Grammar(Protocol):
    def advance(self, token: int) -> None:
        """The output has this token next."""

    def mask(self) -> torch.Tensor:
        """[vocabulary] of bool: whether a token may come now."""


def grammar_of(
    sampling: Sampling, stop_tokens: Sequence[int], vocab_size: int, syntaxes: Syntaxes | None
) -> Grammar | None:
    """At its start: nothing has come yet."""
    if sampling.grammar is not None:
        return ChoiceGrammar(sampling.grammar.outputs, stop_tokens, vocab_size)
    if not sampling.syntax:
        return None
    if syntaxes is None:
        raise PlanError("a request's text has a syntax, and there is no tokenizer.json to follow it by")
    return TextGrammar(sampling.syntax, syntaxes, stop_tokens, vocab_size)


class ChoiceGrammar:
    """One of several outputs, and a stop token once one is whole."""

    def __init__(self, outputs: Sequence[tuple[int, ...]], stop_tokens: Sequence[int], vocab_size: int) -> None:
        self._possible = [*outputs]  # those that begin as the output does
        self._stop_tokens, self._vocab_size = stop_tokens, vocab_size
        self._said = 0

    def advance(self, token: int) -> None:
        said = self._said
        self._possible = [one for one in self._possible if len(one) > said and one[said] == token]
        self._said += 1

    def mask(self) -> torch.Tensor:
        allowed = {one[self._said] for one in self._possible if len(one) > self._said}
        if any(len(one) == self._said for one in self._possible):
            allowed |= set(self._stop_tokens)
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[list(allowed)] = True
        return mask


class TextGrammar:
    """A syntax, and a stop token wherever the text may end. Where it goes wrong, nothing may come any more."""

    def __init__(self, syntax: str, syntaxes: Syntaxes, stop_tokens: Sequence[int], vocab_size: int) -> None:
        self._matcher = syntaxes.matcher(syntax)
        self._stop_tokens, self._vocab_size = list(stop_tokens), vocab_size

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)

    def mask(self) -> torch.Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        may_end = self._matcher.is_accepting()
        allowed[self._stop_tokens] = may_end
        return torch.from_numpy(allowed)
