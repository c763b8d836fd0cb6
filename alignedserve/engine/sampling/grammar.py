"""Grammars of outputs: before each token is sampled, a grammar says which tokens may come next.

A grammar is made from the request's choice (`core.Choice`) or syntax, and gets every token of the output in order. Its
state follows from these alone: on another worker it is made again and gets the tokens that were emitted.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from alignedserve.core import Reasoning, Sampling
from alignedserve.errors import PlanError
from alignedserve.text.reasoning.families import FAMILIES
from alignedserve.text.reasoning.splitting import ReasoningPhase
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
        self._matcher, self._has_begun = self._template.matcher(), False
        self._stop_tokens, self._vocab_size = list(stop_tokens), vocab_size

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._has_begun = True

    def mask(self) -> Tensor:
        if self._has_begun:
            found, may_end = self._matcher.compute_bitmask(), self._matcher.is_accepting()
        else:  # the same for all who follow it
            found, may_end = self._template.first_bits, self._template.may_be_empty
        bits = np.frombuffer(found, dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        allowed[self._stop_tokens] = may_end
        return torch.from_numpy(allowed)


class AfterReasoning:
    """Reasoning before an answer: it ends when its budget is used up, and a grammar holds for the answer alone.

        phase       tokens that may come
        open        those of the grammar, and the next of the reasoning's opening
        reasoning   all, but with a grammar none that ends the output; after the last of budget, the next of the closing
        aside       all
        answer      those of the grammar, which begins here

    All of it follows from the tokens of the output, as for a grammar.
    """

    def __init__(
        self,
        reasoning: Reasoning,
        make_grammar: Callable[[], Grammar | None],
        bytes_of: Callable[[int], bytes],
        stop_tokens: Sequence[int],
        vocab_size: int,
    ) -> None:
        """`make_grammar` makes the grammar of the answer, if there is one."""
        self._reasoning, self._make_grammar, self._bytes_of = reasoning, make_grammar, bytes_of
        self._stop_tokens, self._vocab_size = list(stop_tokens), vocab_size
        self._splitter = FAMILIES[reasoning.family].make_splitter(reasoning.inside, reasoning.calls)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._grammar = make_grammar()  # of the answer; while it is open whether one has begun, as if it had
        self._has_begun = False  # whether it has taken a token
        self._holds = False  # whether the answer has begun and has a grammar, which then holds to the end
        self._begun: list[int] | None = []  # the output, while it may be the beginning of the opening
        self._num_spent = 0  # tokens of reasoning
        self._num_closing = 0  # tokens of the closing that have come

    def advance(self, token: int) -> None:
        """Take the next token of the output."""
        if self._holds and self._grammar is not None:
            self._grammar.advance(token)
            return
        before = self._splitter.phase
        self._count(before, token)
        self._splitter.feed(self._decoder.decode(self._bytes_of(token)))
        after = self._splitter.phase
        if (
            before is ReasoningPhase.OPEN
            and after in (ReasoningPhase.OPEN, ReasoningPhase.ANSWER)
            and self._grammar is not None
        ):
            self._grammar.advance(token)
            self._has_begun = True
        elif after is ReasoningPhase.ANSWER and self._has_begun:
            self._grammar = self._make_grammar()
        self._holds = after is ReasoningPhase.ANSWER and self._grammar is not None

    def mask(self) -> Tensor | None:
        """Return [vocabulary] of bool: whether each token may come now; None if all may."""
        if self._holds and self._grammar is not None:
            return self._grammar.mask()
        phase = self._splitter.phase
        if phase is ReasoningPhase.REASONING:
            return self._mask_in_reasoning()
        if phase is ReasoningPhase.ASIDE or self._grammar is None:
            return None
        mask = self._grammar.mask()
        if phase is ReasoningPhase.OPEN and mask is not None and (opening := self._next_opening) is not None:
            mask[opening] = True
        return mask

    def _count(self, phase: ReasoningPhase, token: int) -> None:
        if self._begun is not None:
            self._begun.append(token)
            if self._reasoning.opening[: len(self._begun)] != tuple(self._begun):
                self._begun = None
        if phase is not ReasoningPhase.REASONING:
            self._num_closing = 0
            return
        if self._is_closing:
            self._num_closing += 1
        self._num_spent += 1

    @property
    def _is_closing(self) -> bool:
        """Return whether the next token is one of the closing."""
        most = self._reasoning.most_tokens
        return most is not None and self._num_spent >= most and self._num_closing < len(self._reasoning.closing)

    @property
    def _next_opening(self) -> int | None:
        """Return the token that continues the opening; None if the output does not begin as one."""
        opening = self._reasoning.opening
        return None if self._begun is None or len(self._begun) >= len(opening) else opening[len(self._begun)]

    def _mask_in_reasoning(self) -> Tensor | None:
        if self._is_closing:
            mask = torch.zeros(self._vocab_size, dtype=torch.bool)
            mask[self._reasoning.closing[self._num_closing]] = True
            return mask
        if self._grammar is None:
            return None
        mask = torch.ones(self._vocab_size, dtype=torch.bool)
        mask[self._stop_tokens] = False
        return mask
