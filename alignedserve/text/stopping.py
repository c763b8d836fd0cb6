"""Where an output's text ends: at a stop string, however the text came in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Of several that are there, the one counts that was whole first; of those the longest.

    Text that may be the beginning of one is held back until it is clear.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include` lets the stop string itself be part of the text."""
        self._stops, self._include = stops, include
        self._held = ""
        self.found = False  # then nothing follows

    def feed(self, text: str) -> str:
        """What is certain to come before any stop string, of this text and of what was held back."""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self._held, self.found = "", True
            return text[: end if self._include else start]
        held = self._most_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _most_held(self, text: str) -> int:
        """Characters at the end with which a stop string begins."""
        most = max((len(stop) for stop in self._stops), default=1) - 1
        lengths = range(min(most, len(text)), 0, -1)
        return next((length for length in lengths if self._begins(text[-length:])), 0)

    def _begins(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
