"""Repeat messages when a frame may have been lost: after a while of silence, or as soon as a gap is seen."""

from __future__ import annotations

from alignedserve.protocol.commands import Command, Send, SetTimer
from alignedserve.protocol.events import Event, LinkGap, Received, TimerFired
from alignedserve.protocol.messages import Missed
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import REFRESH, REFRESH_S, CorePart


class Repeats(CorePart):
    def __init__(self, common: Common) -> None:
        self._roster, self._pool = common.roster, common.pool
        self._is_set = False  # the timer

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case TimerFired(name) if name == REFRESH:
                self._is_set = False
                self._roster.ask_again()
            case Received(sender, Missed()):
                return self._repeat(sender)
            case LinkGap(sender):
                return [Send(sender, Missed()), *self._repeat(sender)]
        return []

    def _repeat(self, to: str) -> list[Command]:
        pool = self._pool.member
        if pool is not None and to == pool.name:
            self._roster.ask_again()
            return []
        return self._roster.repeat(to)

    def set_timer(self, now: float) -> list[Command]:
        """Set the refresh timer while anything is not answered. One timer at a time: else it would never fire."""
        if self._is_set or not self._roster.awaits_answer:
            return []
        self._is_set = True
        return [SetTimer(REFRESH, now + REFRESH_S)]
