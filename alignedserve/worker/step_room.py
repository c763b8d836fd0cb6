"""Limit the tokens of a step: fewer after a step that found too little memory, then more again, step by step."""

from __future__ import annotations

_PATIENCE = 16  # steps that go well before a larger step is tried


class StepRoom:
    def __init__(self, most: int) -> None:
        self._most = most
        self.tokens = most
        self._went_well = 0

    def shrink(self, tokens: int) -> bool:
        """Shrink after a step of so many tokens found too little memory; return whether a smaller one can be tried."""
        self._went_well = 0
        self.tokens = max(1, min(self.tokens, tokens) // 2)
        return tokens > 1

    def grow(self) -> None:
        """Count a step that went well, and grow after enough of them."""
        if self.tokens == self._most:
            return
        self._went_well += 1
        if self._went_well == _PATIENCE:
            self.tokens, self._went_well = min(self._most, 2 * self.tokens), 0
