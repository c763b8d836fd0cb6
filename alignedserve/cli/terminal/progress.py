"""A progress bar on one line of a terminal, with notes; without a terminal only the notes are printed."""

from __future__ import annotations

from time import monotonic
from typing import TextIO

_WIDTH = 30  # of the bar
_PAUSE_S = 0.1  # between two pictures of it
_CLEAR = "\r\x1b[K"


class ProgressBar:
    def __init__(self, label: str, file: TextIO) -> None:
        self._label, self._file = label, file
        self._is_shown = file.isatty()
        self._next_at = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the line, whatever ended the work."""
        self.clear()

    def clear(self) -> None:
        if self._is_shown:
            self._draw(_CLEAR)

    def show(self, done: int, total: int) -> None:
        full = _WIDTH * done // max(1, total)
        self.tell(f"[{'#' * full}{'.' * (_WIDTH - full)}] {done:,} of {total:,}")

    def tell(self, text: str) -> None:
        """Show this behind the label."""
        if self._is_shown and monotonic() >= self._next_at:
            self._next_at = monotonic() + _PAUSE_S
            self._draw(f"{_CLEAR}{self._label} {text}")

    def note(self, text: str) -> None:
        """Print a line of its own, on a terminal or not."""
        self._draw(f"{_CLEAR if self._is_shown else ''}{text}\n")

    def _draw(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
