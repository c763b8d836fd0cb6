"""Cut an output's text at its stop string, even where the string comes split over several pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one output, and the end of its text while that may still become a stop string.

    The first stop string to be complete ends the output, and the longest of those that end together.
    Text that may begin a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Watch for `stops`; with `include` the text ends after the stop string, otherwise before it."""
        self._stops, self._include = stops, include
        self._held = ""
        self.found = ""  # the stop string; once there is one, no more text follows

    def feed(self, text: str) -> str:
        """Return the text that surely comes before any stop string, out of the held text and this text."""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self._held, self.found = "", text[start:end]
            return text[: end if self._include else start]
        settled = len(text) - self._num_held(text)
        self._held = text[settled:]
        return text[:settled]

    def flush(self) -> str:
        """Return the held text, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Return how many characters at the end of the text may begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((length for length in lengths if self._begins_stop(text[-length:])), 0)

    def _begins_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
