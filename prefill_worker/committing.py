"""Prompts that are through and go to the pool: they wait for pages, are copied to them, and are committed.

committing ── pages at hand ──▶ copying ──▶ Commit: the pool has the request
   ▲  (no pages)                   ├── the pool has taken back what it knew of the prompt ──┐
   └───────────────────────────────┴── the pool was lost ──────────────────────────────────┘
"""

from __future__ import annotations

from collections import deque

from alignedserve.core import ServiceClass
from alignedserve.explain.decisions import Kind
from alignedserve.prefill_worker.candidates import Candidates
from alignedserve.prefill_worker.known_pages import KnownPages
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event, MemberLost
from alignedserve.protocol.messages import Attempt, Commit, Member
from alignedserve.worker.page_writer import Copy
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running


class Commits(CorePart):
    def __init__(self, common: Common, candidates: Candidates, known: KnownPages) -> None:
        self._pool, self._memory, self._writer = common.pool, common.memory, common.writer
        self._names, self._reuse, self._outputs = common.names, common.policy.reuse, common.owners.outputs
        self._candidates, self._known, self._decisions = candidates, known, common.decisions
        self.waiting: deque[Running] = deque()  # prompts that are through and wait for pages

    @property
    def target(self) -> Member | None:
        """Return the pool that may be written to now."""
        return self._writer.target(self._pool.member)

    def add(self, running: Running) -> None:
        """Let a prompt that is through wait for pages."""
        self._decisions.note(Kind.WRITES, running.request, tokens=running.prefix, number=len(self.waiting))
        self.waiting.append(running)

    def first(self, service: ServiceClass) -> Running | None:
        """Return the prompt of this class that has waited longest for pages."""
        return next((running for running in self.waiting if running.request.service is service), None)

    def unwritten(self, running: Running) -> int:
        """Return how many pages are to be written of a prompt that is through."""
        return self._writer.pages_for(running, running.prefix)

    def names_of(self, running: Running) -> tuple[int, ...]:
        """Return the names of the full pages of a prompt that is through; none where prompts are not reused."""
        return self._names.pages_of(running, running.prefix) if self._reuse else ()

    def end_copy(self, copy: Copy) -> list[Command]:
        """Commit a prompt whose copy has ended, or take its pages back."""
        running = copy.running
        if not copy.wanted or self._pool.member is None:
            self._memory.give(running.pairs)
            self._writer.take_back(copy)
            return []
        if running.known != copy.known:  # the pool has taken them back: now all is to be copied
            self._writer.take_back(copy)
            self.waiting.appendleft(running)
            self._memory.reconsider()
            return []
        self._memory.pages.note_in_pool(running)
        self._memory.give(running.pairs)
        self._outputs.forget([running.request.id])  # the decode worker gets the whole output, and keeps it
        return self.commit(copy, running.decode)

    def commit(self, copy: Copy, to: str, is_there: bool = False) -> list[Command]:
        """Hand the pages of a copy on to the pool, with the decode worker that the router named."""
        self._writer.hand_on(copy)
        if not is_there:
            self._decisions.note(Kind.COMMITTED, copy.running.request, tokens=copy.running.prefix)
        entry = copy.running.entry(copy.known + copy.pages, self.names_of(copy.running))
        return self._pool.send(Commit(entry, len(copy.known), to, is_there))

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case MemberLost(member) if member == self._pool.member:
                self._lose_pool()
        return []

    def _lose_pool(self) -> None:
        """Prompts that were being copied wait to be copied anew, once there is a pool."""
        offered = {id(candidate.running) for candidate in self._candidates}
        again = [running for running in self._writer.lose_pool() if id(running) not in offered]
        self.waiting = deque([*again, *self.waiting])

    def drop(self, request: str, attempt: int) -> list[Command]:
        commands: list[Command] = []
        for running in [running for running in self.waiting if running.is_of(request, attempt)]:
            self.waiting.remove(running)
            self._writer.forget_parts(running)
            self._memory.leave(running.pairs)
            commands += self._known.leave(running)
        return commands

    def attempts(self) -> list[Attempt]:
        offered = {id(candidate.running) for candidate in self._candidates}
        copied = [copy.running for copy in self._writer.copies if copy.wanted and id(copy.running) not in offered]
        return [running.key for running in (*self.waiting, *copied)]

    def occupants(self) -> list[Running]:
        return [*self.waiting, *(copy.running for copy in self._writer.copies)]
