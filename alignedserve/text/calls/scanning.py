"""Find where a value ends, in JSON or in Python, while its text arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod

_OPENING, _CLOSING = "([{", ")]}"


class ValueEnd(ABC):
    """Finds the end of one value. Each text continues the text before."""

    QUOTES = '"'

    def __init__(self) -> None:
        self._quote, self._escaped, self._depth = "", False, 0

    def find(self, text: str, start: int) -> int | None:
        """Return where the value ends, which has not ended before `start`; None if it goes on after the text."""
        for at in range(start, len(text)):
            if (end := self._read(text[at], at)) is not None:
                return end
        return None

    @abstractmethod
    def _read(self, character: str, at: int) -> int | None:
        """Read on by one character; return where the value ends, if that is known now."""

    def _follow(self, character: str) -> bool:
        """Follow strings and brackets; return whether the character stands outside all of them."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
            return False
        if character in self.QUOTES:
            self._quote = character
        elif character in _OPENING:
            self._depth += 1
        elif character in _CLOSING:
            self._depth -= 1
        return self._depth == 0 and not self._quote


class JsonEnd(ValueEnd):
    """A JSON value ends after its closing bracket or quote, otherwise before a comma, a bracket or white space."""

    def __init__(self) -> None:
        super().__init__()
        self._encloses: bool | None = None  # whether the value has a closing bracket or quote

    def _read(self, character: str, at: int) -> int | None:
        if self._encloses is None:
            self._encloses = character in '"{['
        if not self._encloses:
            return at if character in ",]} \t\r\n" else None
        self._follow(character)
        return at + 1 if not self._quote and self._depth == 0 else None


class PythonEnd(ValueEnd):
    """A Python argument ends before the comma or the bracket that follows it."""

    QUOTES = "\"'"

    def _read(self, character: str, at: int) -> int | None:
        if not self._quote and self._depth == 0 and character in ",)]}":
            return at
        self._follow(character)
        return None
