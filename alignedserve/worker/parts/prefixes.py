"""Prompts that begin as others did: what the pool still has of their beginning is not computed again.

    Prefill ─▶ asking ── Prefix ──▶ waiting ──▶ fetching ── CopiedIn ──▶ running, from the first unknown token on
                  └── no answer ──▶            (seated)        └── not intact ──▶ running, from its first token on

The pool holds the pages for the attempt until its Commit or Keep names them, or a Release lets them go.
"""

from __future__ import annotations

from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event, MemberLost, Received
from alignedserve.protocol.messages import AskPrefix, Attempt, Prefix, Release
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.parts.pool_holds import PoolHolds
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.step.running import Running

ANSWER_S = 0.005  # a step waits so long for the pool's word on a chat: it takes about a millisecond


class Prefixes(CorePart):
    def __init__(self, common: Common, queue: PromptQueue, holds: PoolHolds | None = None) -> None:
        """`holds` notes the attempts for which the pool keeps pages, where the worker keeps account of them."""
        self._roster, self._pool, self._names = common.roster, common.pool, common.names
        self._writer, self._reuse = common.writer, common.policy.reuse
        self._queue, self._holds = queue, holds
        self._asking: dict[str, Running] = {}
        self._unanswered: set[str] = set()  # those that were asking at the last look: at the next look they go on
        self._answered_by = 0.0  # until then the next step waits for the pool's word on a chat's prompt

    @property
    def asking(self) -> list[Running]:
        """Return the prompts that wait for the pool's answer."""
        return list(self._asking.values())

    def admit(self, running: Running, now: float) -> list[Command]:
        """Ask the pool what it knows of a new prompt, or let the prompt wait for room where there is nothing to ask."""
        names = self._askable(running)
        if not names:
            self._queue.admit(running, now)
            return []
        if running.promise.is_rt and not self._has_chat:
            self._answered_by = now + ANSWER_S
        self._asking[running.request.id] = running
        return self._pool.send(AskPrefix(*running.key, names, running.request.service))

    @property
    def answered_by(self) -> float:
        """Return until when the next step is to wait for the pool's word on a chat's prompt; 0 where none asks."""
        return self._answered_by if self._has_chat else 0.0

    @property
    def _has_chat(self) -> bool:
        return any(running.promise.is_rt for running in self._asking.values())

    def _askable(self, running: Running) -> tuple[int, ...]:
        """Return the names of the full pages that the pool may have."""
        return self._names.pages_before_last(running) if self._reuse and self._pool.member is not None else ()

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(message=Prefix() as prefix):
                return self._answered(prefix, now)
            case MemberLost(member) if member == self._pool.member:
                self._queue.add_again([self._leave(request) for request in list(self._asking)])
                for running in (*self._roster.occupants(), *self._queue.waiting):
                    running.forget_known()
        return []

    def _answered(self, prefix: Prefix, now: float) -> list[Command]:
        attempt, running = (prefix.request, prefix.attempt), self._asking.get(prefix.request)
        if running is None or running.key != attempt:
            return self._answered_late(attempt, prefix.pages)
        running.known = prefix.pages
        self._note(attempt, bool(prefix.pages))
        self._queue.admit(self._leave(prefix.request), now)
        return []

    def _answered_late(self, attempt: Attempt, pages: tuple[int, ...]) -> list[Command]:
        """Forget what was known of a prompt that has gone on if the pool keeps nothing for it; release what it keeps
        for a prompt that is not here any more."""
        having = (*self._roster.occupants(), *self._queue.waiting)
        here = [running for running in having if running.key == attempt]
        if not pages:
            for running in here:
                self._writer.forget_parts(running)  # they come after what is to be written now
                running.forget_known()
        if here:
            self._note(attempt, bool(pages))
            return []
        return self._pool.send(Release(*attempt)) if pages else []

    def _note(self, attempt: Attempt, is_held: bool) -> None:
        if self._holds is not None:
            (self._holds.add if is_held else self._holds.discard)(attempt)

    def ask_again(self) -> None:
        """Let prompts go on without an answer that were asking at the last look already: the ask or its answer was
        lost."""
        late = [self._leave(request) for request in list(self._asking) if request in self._unanswered]
        self._unanswered = set(self._asking)
        self._queue.add_again(late)

    @property
    def awaits_answer(self) -> bool:
        return bool(self._asking)

    def drop(self, request: str, attempt: int) -> list[Command]:
        """Forget the prompt. The answer to its ask finds no request here, and what is held for it is released then."""
        running = self._asking.get(request)
        if running is not None and running.is_of(request, attempt):
            self._leave(request)
        return []

    def attempts(self) -> list[Attempt]:
        return [running.key for running in self._asking.values()]

    def _leave(self, request: str) -> Running:
        self._unanswered.discard(request)
        return self._asking.pop(request)
