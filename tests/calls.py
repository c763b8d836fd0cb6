"""Counting function calls, where a test is of what something costs: they are the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable


def calls_of(act: Callable[[], object]) -> int:
    """Count the function calls that the action makes."""
    count = 0

    def note(_frame: object, what: str, _of: object) -> None:
        nonlocal count
        count += what in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count
