"""What came lately: a moving sum that forgets what is old."""

from __future__ import annotations

from math import log

_LEAST_SEEN_S = 1.0  # before which nothing is said of a rate


class MovingSum:
    """A sum in which an amount counts half after a time, a quarter after twice that time, and so on."""

    def __init__(self, halved_s: float) -> None:
        self._halved_s, self._sum, self._began_at, self._at = halved_s, 0.0, 0.0, 0.0

    def add(self, amount: float, now: float) -> None:
        if not self._sum:
            self._began_at = self._at = now
        self._sum, self._at = self.sum(now) + amount, now

    def sum(self, now: float) -> float:
        return self._sum * float(0.5 ** ((now - self._at) / self._halved_s))

    def rate(self, now: float) -> float:
        """Return the amount per second; 0 until some time has been seen."""
        seen_s = self._halved_s / log(2) * (1 - 0.5 ** ((now - self._began_at) / self._halved_s))
        return self.sum(now) / seen_s if self._sum and seen_s >= _LEAST_SEEN_S else 0.0
