"""How many lines may be open at once: as many as the system has room for, as far as that can be seen from here.

A line that is open *waits* until it has its second token: the first comes from its prompt's step, and whoever has one
more has a place on a decode worker. As many may wait as run, and a few when none does: then there is always a next one
for a worker that has room, workers have some to choose from, and behind a system that is busy with chats nothing piles
up. A few are a moment's work for a large deployment, and who wants one token never runs: so as long as lines wait
shortly, one more may for each that has its place, and one fewer as soon as they do not. Where the router refuses a
line, half as many may be open, and one more for each that ends.
"""

from __future__ import annotations

FIRST = 8  # lines that may wait, however long they do, while none runs
SHORT_S, LONG_S = 0.5, 1.0


class Window:
    def __init__(self, most: int) -> None:
        self._most = most
        self._ceiling = float(most)
        self._may_wait = FIRST
        self._paused_until = 0.0

    def may_open(self, num_open: int, num_running: int, now: float) -> bool:
        if now < self._paused_until or num_open >= self._ceiling:
            return False
        return num_open - num_running < max(self._may_wait, num_running)

    def placed(self, waited_s: float) -> None:
        """A line runs, or has ended without."""
        if waited_s < SHORT_S:
            self._may_wait = min(self._most, self._may_wait + 1)
        elif waited_s > LONG_S:
            self._may_wait = max(FIRST, self._may_wait - 1)

    def refused(self, num_open: int, retry_after_s: float, now: float) -> None:
        """By the router. `num_open` with it."""
        self._ceiling = max(1.0, min(self._ceiling, num_open / 2))
        self._may_wait = max(FIRST, self._may_wait // 2)
        self._paused_until = max(self._paused_until, now + retry_after_s)

    def ended(self) -> None:
        self._ceiling = min(self._most, self._ceiling + 1)
