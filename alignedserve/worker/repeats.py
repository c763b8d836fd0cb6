"""Says messages again whose frames may have been lost."""

from __future__ import annotations

from alignedserve.protocol.commands import Command, Send, SetTimer
from alignedserve.protocol.events import LinkGap, Received, TimerFired
from alignedserve.protocol.messages import Missed
from alignedserve.worker.part import REFRESH, REFRESH_S, CorePart
from alignedserve.worker.pool import PoolLink


class Repeats:
    """Repeats messages when a frame may have been lost: after a while of silence, or as soon as a gap is seen."""

    def __init__(self, pool: PoolLink, *parts: CorePart) -> None:
        self._pool, self._parts = pool, parts
        self._is_set = False  # the timer

    def timer_fired(self, event: TimerFired, now: float) -> None:
        if event.name == REFRESH:
            self._is_set = False
            self._ask_again()

    def missed(self, message: Missed, frame: Received, now: float) -> list[Command]:
        return self._repeat(frame.sender)

    def link_gap(self, event: LinkGap, now: float) -> list[Command]:
        return [Send(event.sender, Missed()), *self._repeat(event.sender)]

    def _repeat(self, to: str) -> list[Command]:
        pool = self._pool.member
        if pool is not None and to == pool.name:
            self._ask_again()
            return []
        return [command for part in self._parts for command in part.repeat(to)]

    def _ask_again(self) -> None:
        for part in self._parts:
            part.ask_again()

    def set_timer(self, now: float) -> list[Command]:
        """Set the refresh timer while anything is not answered. One timer at a time: else it would never fire."""
        if self._is_set or not any(part.awaits_answer for part in self._parts):
            return []
        self._is_set = True
        return [SetTimer(REFRESH, now + REFRESH_S)]
