"""How many tokens a step may have: fewer after one that found too little memory, then more again, step by step."""

from __future__ import annotations

_PATIENCE = 16  # steps that go well before a larger one is tried


class StepRoom:
    def __init__(self, most: int) -> None:
        self._most = most
        self.tokens = most
        self._went_well = 0

    def failed(self, tokens: int) -> bool:
        """A step of so many found too little memory. Whether a smaller one is left to try."""
        self._went_well = 0
        self.tokens = max(1, min(self.tokens, tokens) // 2)
        return tokens > 1

    def succeeded(self) -> None:
        if self.tokens == self._most:
            return
        self._went_well += 1
        if self._went_well == _PATIENCE:
            self.tokens, self._went_well = min(self._most, 2 * self.tokens), 0
