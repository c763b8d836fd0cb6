"""Tell the router which requests the worker holds, which have moved on, and how much is left to run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from alignedserve.core import Role
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, MemberJoined, Received
from alignedserve.protocol.messages import ROUTER, Attempt, Holding, Inquire, Release
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.parts.prompt_rate import PromptRate


class RouterLink(CorePart):
    def __init__(
        self,
        common: Common,
        rate: PromptRate,
        settled: Callable[[], Collection[Attempt]] = frozenset,
    ) -> None:
        """`settled` returns the attempts that are not here any more and that the pool will hear of anyway."""
        self._roster, self._notes, self._memory = common.roster, common.notes, common.memory
        self._retirement, self._pool = common.retirement, common.pool
        self._rate, self._settled = rate, settled

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(sender, Inquire(attempts)):
                held = set(self._roster.attempts())
                return self._answer(sender, [attempt for attempt in attempts if attempt not in held])
            case MemberJoined(member) if member.role is Role.ROUTER:
                self._notes.renew()
                return [self._holding()]
        return []

    def _answer(self, asker: str, unknown: list[Attempt]) -> list[Command]:
        """Tell the router which attempts are not here; release the pages that the pool keeps for them."""
        if asker == ROUTER or self._pool.member is None:
            for attempt in unknown:
                self._notes.note("unknown", attempt)
            return []
        settled, pool = self._settled(), self._pool.member.name
        return [Send(pool, Release(*attempt)) for attempt in unknown if attempt not in settled]

    def repeat(self, to: str) -> list[Command]:
        return [self._holding()] if to == ROUTER else []

    def _holding(self) -> Command:
        held = tuple(self._roster.attempts())
        return Send(ROUTER, Holding(held, self._memory.num_free, self._retirement.is_retiring))

    def report(self, now: float) -> list[Command]:
        """Tell the router what it has not been told yet, if anything."""
        progress = self._notes.report(partial(self._rate.backlog, now), self._memory.num_free, now)
        return [] if progress is None else [Send(ROUTER, progress)]
