"""Grammars: which tokens may come next, asked before each token is sampled.

A grammar is made of what the request says of it (`core.Choice`) and is told every token of the output, in order.
It keeps no more than follows from these: on another worker it is made anew and told what was emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from alignedserve.core import Choice


class Grammar(Protocol):
    def advance(self, token: int) -> None:
        """The output has this token next."""

    def mask(self) -> torch.Tensor:
        """[vocabulary] of bool: whether a token may come now."""


def grammar_of(spec: Choice, stop_tokens: Sequence[int], vocab_size: int) -> Grammar:
    """At its start: nothing has come yet."""
    return ChoiceGrammar(spec.outputs, stop_tokens, vocab_size)


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
