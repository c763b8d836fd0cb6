"""Measure a rate, such as tokens per second, over about the last half minute."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

MEMORY_S = 30.0  # an amount that is older by this time counts for 1/e
KNOWN_S = 2.0  # before this age the rate is unknown


@dataclass
class Rate:
    """A mean with exponentially fading memory, corrected for the memory that it lacks in its first seconds."""

    began_at: float
    _sum: float = 0.0
    _at: float = 0.0

    def add(self, amount: float, now: float) -> None:
        self._sum = self._faded(now) + amount
        self._at = now

    def per_s(self, now: float) -> float | None:
        """Return the amount per second, or None while it is unknown."""
        age_s = now - self.began_at
        if age_s < KNOWN_S or not self._sum:
            return None
        return self._faded(now) / (MEMORY_S * (1 - exp(-age_s / MEMORY_S)))

    def _faded(self, now: float) -> float:
        return self._sum * exp(-max(0.0, now - self._at) / MEMORY_S)
