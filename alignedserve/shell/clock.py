"""The clock that shells read and hand to their cores."""

from __future__ import annotations

import time


class Clock:
    """Seconds since 1970 that never go back: comparable between the processes of one machine."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()
