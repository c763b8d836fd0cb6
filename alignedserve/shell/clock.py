"""The clock that shells read and hand to their cores."""

from __future__ import annotations

import time


class Clock:
    """Seconds since 1970 that never go back; processes of one machine can compare them."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()

    def until(self, at: float) -> float:
        """Return the seconds from now until `at`: zero or less when `at` has passed."""
        return at - self.now()
