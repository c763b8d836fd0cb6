"""Pages that a worker compresses for the pool, beside its steps."""

from __future__ import annotations

from alignedserve.core import Role
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event, MemberJoined, PageCompressed, Received
from alignedserve.protocol.messages import Compress, Compressed
from alignedserve.worker.compressing import Compressing
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart


class PageCompression(CorePart):
    def __init__(self, common: Common) -> None:
        self._pool, self._pace, self._steps, self._roster = common.pool, common.pace, common.steps, common.roster
        self._orders = Compressing()

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(message=Compress() as order):
                return self._send(self._orders.take(order))
            case PageCompressed() as page:
                return self._send(self._orders.end_page(page))
            case MemberJoined(member) if member.role is Role.POOL:
                self._orders.meet(member.holder)
        return []

    def compress(self, now: float) -> list[Command]:
        """Compress a page where no step is due: none runs, or no request is late if the next one begins later."""
        if self._pool.member is None or not self._orders.has_work or not self._can_wait(self._orders.page_s, now):
            return []
        return [self._orders.next_page()]

    def _can_wait(self, seconds: float, now: float) -> bool:
        """Return whether no request's next token is late if the step after the one in flight begins so much later."""
        if self._steps.running is None:
            return True
        bound = now + 2 * self._pace.times.most_s + seconds
        promises = (running.promise for running in self._roster.occupants())
        return all(promise.due_at(now) > bound for promise in promises if promise.is_rt)

    def _send(self, answer: Compressed | None) -> list[Command]:
        return [] if answer is None else self._pool.send(answer)
