"""A progress bar on one line of a terminal, with notes; without a terminal a line now and then, and the notes."""

from __future__ import annotations

from shutil import get_terminal_size
from time import monotonic
from typing import TextIO

_WIDTH = 30  # of the bar
_PAUSE_S = 0.1  # between two pictures of it
_LOG_PAUSE_S = 15.0  # the same without a terminal
_MINUTES_FROM_S, _HOURS_FROM_S = 90.0, 90.0 * 60
_CLEAR = "\r\x1b[K"


def about(seconds: float) -> str:
    """Return an estimate of a time as people say it: about 40 s, about 3 min, about 2.5 h."""
    if seconds < _MINUTES_FROM_S:
        return f"about {max(1, seconds):.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < _HOURS_FROM_S else f"about {seconds / 3600:.1f} h"


class ProgressBar:
    _next_line_at = monotonic() + _LOG_PAUSE_S  # of all bars together: a command may have many short ones

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

    def show(self, done: int, total: int, left_s: float | None = None) -> None:
        full = _WIDTH * done // max(1, total)
        left = "" if left_s is None else f", {about(left_s)} left"
        self.tell(f"[{'#' * full}{'.' * (_WIDTH - full)}] {done:,} of {total:,}{left}")

    def tell(self, text: str) -> None:
        """Show this behind the label."""
        now = monotonic()
        if self._is_shown and now >= self._next_at:
            self._next_at = now + _PAUSE_S
            self._draw(f"{_CLEAR}{self._label} {text}")
        elif not self._is_shown and now >= ProgressBar._next_line_at:
            ProgressBar._next_line_at = now + _LOG_PAUSE_S
            self.note(f"{self._label} {text}")

    def note(self, text: str) -> None:
        """Print a line of its own, on a terminal or not."""
        self._draw(f"{_CLEAR if self._is_shown else ''}{text}\n")

    def _draw(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


class StatusLine:
    """A line of a terminal that is rewritten while something waits. Elsewhere the first text alone is printed."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_shown, self._is_empty, self._has_said_why = file.isatty(), True, False

    def show(self, text: str, why: str = "") -> None:
        """Show the text, and why: a terminal shows the first reason whole, in a line above that stays."""
        if self._is_shown and why and not self._has_said_why:
            self._has_said_why = True
            self._draw(f"{_CLEAR}{why}\n")
        if self._is_shown:  # in one row, and the ^C of a person too: what wraps cannot be rewritten
            self._draw(f"{_CLEAR}{text[: get_terminal_size().columns - 3]}")
        elif self._is_empty:
            self._draw(f"{text}{': ' if why else ''}{why}\n")
        self._is_empty = False

    def clear(self) -> None:
        if self._is_shown and not self._is_empty:
            self._draw(_CLEAR)
            self._is_empty = True

    def _draw(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
