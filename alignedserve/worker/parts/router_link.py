"""Tell the router which requests the worker holds, which have moved on, and how much is left to run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from alignedserve.core import Role
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, MemberJoined, Received
from alignedserve.protocol.messages import ROUTER, Attempt, Backlog, Holding, Inquire, Release
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.step.running import Running


class RouterLink(CorePart):
    def __init__(
        self,
        common: Common,
        queue: PromptQueue,
        prompts: Callable[[], Iterable[Running]],
        settled: Callable[[], Collection[Attempt]] = frozenset,
    ) -> None:
        """`prompts` returns the seated prompts that are not through; `settled`, the attempts that are not here any more
        and that the pool will hear of anyway."""
        self._roster, self._notes, self._memory = common.roster, common.notes, common.memory
        self._retirement, self._pool, self._pace = common.retirement, common.pool, common.pace
        self._queue, self._prompts, self._settled = queue, prompts, settled

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(sender, Inquire(attempts)):
                held = set(self._roster.attempts())
                return self._answer(sender, [attempt for attempt in attempts if attempt not in held])
            case MemberJoined(member) if member.role is Role.ROUTER:
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
        progress = self._notes.report(self._backlog, self._memory.num_free)
        return [] if progress is None else [Send(ROUTER, progress)]

    def _backlog(self) -> Backlog:
        token_s, waiting = self._pace.prompt_token_s, self._queue.waiting
        ahead = [(running.promise.is_rt, running.num_ahead) for running in self._prompts()]
        tokens = waiting.num_tokens + sum(tokens for _, tokens in ahead)
        rt_tokens = waiting.num_rt_tokens + sum(tokens for is_rt, tokens in ahead if is_rt)
        return Backlog(token_s * tokens, token_s, token_s * rt_tokens)
