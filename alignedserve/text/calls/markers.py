"""Find markers in a text that is still arriving: its end may be the beginning of one."""

from __future__ import annotations

from collections.abc import Iterable


def find_first(text: str, markers: Iterable[str], start: int = 0) -> tuple[int, str] | None:
    """Return where the first marker stands and which it is, the longest of several; None if there is none."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


def num_unsettled(text: str, markers: Iterable[str]) -> int:
    """Return how many characters at the end of the text may begin a marker."""
    marks = tuple(markers)
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if _begins(text[-length:], marks)), 0)


def _begins(end: str, markers: Iterable[str]) -> bool:
    return any(len(end) < len(marker) and marker.startswith(end) for marker in markers)
