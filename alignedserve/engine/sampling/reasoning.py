"""Reasoning before an answer: it ends when its budget is used up, and a grammar holds for the answer alone.

    phase       tokens that may come
    open        those of the grammar, and the next of the reasoning's opening
    reasoning   all; none that ends the output, if there is a grammar; the next of the closing after the last of budget
    aside       all
    answer      those of the grammar, which begins here

All of it follows from the tokens of the output, as for a grammar.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alignedserve.core import Reasoning
from alignedserve.engine.sampling.grammar import Grammar
from alignedserve.text.reasoning.families import FAMILIES
from alignedserve.text.reasoning.splitting import ReasoningPhase


class AfterReasoning:
    """The grammar of an output that may reason before its answer."""

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
