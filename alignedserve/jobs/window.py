"""Decide how many lines may be open at once: as many as the job runner finds room for in the system.

An open line *waits* until its second token: the first token comes from the prompt's step, and a line with a second
token has a place on a decode worker. As many lines may wait as run, and FIRST if none runs. So a worker that has room
finds a next line and some choice, and no lines pile up behind a system that is busy with chats.

A large deployment runs FIRST lines in a moment, and a line that asks for a single token never runs. So the number that
may wait grows by 1 for each line that gets its place after a short wait, and shrinks by 1 for each long wait. When the
router refuses a line, only half as many lines may be open, and then 1 more for each line that ends.
"""

from __future__ import annotations

FIRST = 8  # lines that may wait while none runs, however long they wait
SHORT_S, LONG_S = 0.5, 1.0  # a short and a long wait
MOST_PAUSE_S = 5.0  # after a refusal: the router's wait is an estimate, far too long just after an outage


class LineWindow:
    def __init__(self, most: int) -> None:
        self._most = most
        self._ceiling = float(most)
        self._may_wait = FIRST
        self._paused_until = 0.0

    def may_open(self, num_open: int, num_running: int, now: float) -> bool:
        if now < self._paused_until or num_open >= self._ceiling:
            return False
        return num_open - num_running < max(self._may_wait, num_running)

    def place(self, waited_s: float) -> None:
        """Take note that a line runs, or has ended without running, after this wait."""
        if waited_s < SHORT_S:
            self._may_wait = min(self._most, self._may_wait + 1)
        elif waited_s > LONG_S:
            self._may_wait = max(FIRST, self._may_wait - 1)

    def refuse(self, num_open: int, retry_after_s: float, now: float) -> None:
        """Take note that the router refused a line; `num_open` includes the refused line."""
        self._ceiling = max(1.0, min(self._ceiling, num_open / 2))
        self._may_wait = max(FIRST, self._may_wait // 2)
        self._paused_until = max(self._paused_until, now + min(retry_after_s, MOST_PAUSE_S))

    def end(self) -> None:
        """Take note that a line has ended."""
        self._ceiling = min(self._most, self._ceiling + 1)
