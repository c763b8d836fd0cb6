"""Says messages again whose frames may have been lost."""

from __future__ import annotations

from alignedserve.protocol.commands import Command, Send, SetTimer
from alignedserve.protocol.events import LinkGap, Received, TimerFired
from alignedserve.protocol.messages import Missed
from alignedserve.worker.part import REFRESH, REFRESH_S, CorePart
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.requests import Requests


class Repeats(CorePart):
    """Repeats messages when a frame may have been lost: after a while of silence, or as soon as a gap is seen."""

    def __init__(self, here: Requests, pool: PoolLink) -> None:
        self._here, self._pool = here, pool
        self._is_set = False  # the timer

    def timer_fired(self, event: TimerFired, now: float) -> None:
        if event.name == REFRESH:
            self._is_set = False
            self._here.ask_again()

    def missed(self, message: Missed, frame: Received, now: float) -> list[Command]:
        return self._repeat(frame.sender)

    def link_gap(self, event: LinkGap, now: float) -> list[Command]:
        return [Send(event.sender, Missed()), *self._repeat(event.sender)]

    def _repeat(self, to: str) -> list[Command]:
        pool = self._pool.member
        if pool is not None and to == pool.name:
            self._here.ask_again()
            return []
        return self._here.repeat(to)

    def set_timer(self, now: float) -> list[Command]:
        """Set the refresh timer while anything is not answered. One timer at a time: else it would never fire."""
        if self._is_set or not self._here.awaits_answer:
            return []
        self._is_set = True
        return [SetTimer(REFRESH, now + REFRESH_S)]
