"""Levels of requests: the fewer steps are predicted to be left, or the fewer were served, the higher (ALISE §3.1).

Five of them, the first is the highest. The first reaches to 32 steps, each other twice as far as the one before:

    level     0      1      2       3       4
    steps   ..32   ..64   ..128   ..256   257..

A step brings a token, so a bound of so many median steps is one of so many tokens.
"""

from __future__ import annotations

LEVELS = 5
FIRST_BOUND = 32  # steps of the first level
TOP = -1  # of who has waited for an age in the first level
AGE_S = 10.0  # unserved, after which a best-effort request rises a level


def level_of(steps: int) -> int:
    """By what is predicted to be left."""
    return min(LEVELS - 1, ((max(1, steps) - 1) // FIRST_BOUND).bit_length())  # asked of many at every step


def level_served(tokens: int) -> int:
    """By what was served already: who has used up the bound of a level goes on in the next one (no prediction)."""
    return sum(tokens >= (FIRST_BOUND << bound + 1) - FIRST_BOUND for bound in range(LEVELS - 1))


class Level:
    """Of one best-effort request, while it is served and while it waits."""

    __slots__ = ("_age_s", "_num_outlived", "_served_at")

    def __init__(self, served_at: float, age_s: float) -> None:
        self._served_at, self._age_s, self._num_outlived = served_at, age_s, 0

    def served(self, now: float) -> None:
        self._served_at = now

    def outlived(self) -> None:
        """Its prediction was too low: it drops a level, whatever is predicted now."""
        self._num_outlived += 1

    def at(self, now: float, steps: int) -> int:
        """With so many steps predicted to be left. It rises by one for each time that it has waited as long as age.

        Above the first level is who has waited at its top as well: before all others, else the short would always come
        first there.
        """
        return max(TOP, min(LEVELS - 1, level_of(steps) + self._num_outlived) - self._rises(now))

    def rises_at(self, now: float) -> float:
        """The next time that it does."""
        return self._served_at + (self._rises(now) + 1) * self._age_s

    def _rises(self, now: float) -> int:
        """As many as have passed, to the last bit: who asks again after `rises_at` finds another level."""
        if now <= self._served_at + self._age_s:
            return 0
        rises = max(0, int((now - self._served_at) / self._age_s))
        while rises > 0 and self._served_at + rises * self._age_s >= now:
            rises -= 1
        while self._served_at + (rises + 1) * self._age_s < now:
            rises += 1
        return rises
