"""What a decode worker writes to the pool: who has to leave, and the answers of those that have ended.

    resident ── pages at hand ──▶ evicted (pairs to pages) ──▶ Commit: it waits in the pool again
       └── ended ──▶ kept (its answer to pages) ──▶ Keep: for whoever goes on from there

Written is only what the pool lacks: the full pages of the entry as it was handed out stay its own. The worker never
waits for pages: it has spare ones at hand (page_writer.py), and does without where there are none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import CopiedOut, Event, Received
from alignedserve.protocol.messages import ROUTER, SPARE, Attempt, Commit, GiveBack, Keep, LeasePages, Member, Release
from alignedserve.scheduling.policy import Entries
from alignedserve.worker.core import WorkerCore, WorkerSetup
from alignedserve.worker.page_writer import Copy, PageNames, PageWriter
from alignedserve.worker.step.running import Running


class ToPoolCore(WorkerCore):
    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self._names = PageNames(setup.limits.page_size, setup.root)  # as a prefill worker has them
        self._writer = PageWriter(setup.limits.page_size)
        self._lacks = (0, 0)  # step, and pages that one of its residents may need
        self._residents: dict[str, Running] = {}
        self._kept: list[Running] = []  # have ended, and pairs until their answers are on their way to the pool
        self._from_pool: dict[str, Attempt] = {}  # requests whose pages the pool keeps for us
        self.num_kept_pages = 0  # of answers

    @property
    def leased_pages(self) -> tuple[int, ...]:
        return self._writer.leased

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(message=LeasePages() as lease):
                self._writer.answered(lease)
                return []
            case Received(message=GiveBack()):
                return [] if self._writes_to is None else [self._writer.give_back(self._writes_to)]
            case CopiedOut(number):
                copy = self._writer.ended(number)
                return [] if copy is None else self._copied_out(copy)
        return super()._happened(event)

    @property
    def _writes_to(self) -> Member | None:
        return self._pool if self._pool is not None and self._writer.may_write(self._pool) else None

    def _ask_for_pages(self) -> list[Command]:
        """As many as would be written of one that leaves, or ends, with the next token: of whom it would be most."""
        pool, size = self._writes_to, self._limits.page_size
        writes = self._policy.reuse or self._policy.grows or self._pages_to_take_in > 0
        if pool is None or not writes or self._policy.entries is Entries.HIDDEN:
            return []
        if self._lacks[0] != self._steps.number:  # looked at once a step
            last = size if self._policy.grows else 1  # who has to leave needs a page for a part of one
            last += self._steps.has_next  # one more token is on its way
            residents = (one for one in self._residents.values() if self._is_written(one))
            lacks = ((one.prefix + last) // size - len(one.known) for one in residents)
            self._lacks = (self._steps.number, max(lacks, default=0))
        return self._writer.ask_for_spare(pool, max(self._lacks[1], self._pages_to_take_in))

    @property
    @abstractmethod
    def _pages_to_take_in(self) -> int:
        """For a request of a node without a pool, which is to wait in ours."""

    @staticmethod
    def _is_written(running: Running) -> bool:
        """Whether what is kept of it on the device is what its pages hold."""
        return not running.blocks

    def _pages_to_keep(self, running: Running) -> int:
        """Of its answer, where the pool has what comes before, and there are pages at hand."""
        if not self._policy.reuse or self._writes_to is None or self._from_pool.get(running.request.id) != running.key:
            return 0
        if not self._is_written(running):
            return 0
        full = running.prefix // self._limits.page_size - len(running.known)
        return min(full, self._writer.num_at_hand(SPARE))

    def _keep_answers(self) -> list[Command]:
        """After the step that is due, and only if the one after it will not be late for that."""
        commands: list[Command] = []
        kept, self._kept = self._kept, []
        copied = 0
        for running in kept:
            pages, pool = self._pages_to_keep(running), self._writes_to
            more = pages * self._limits.page_size
            if pool is not None and pages > 0 and self._has_time_for(copied + more):
                copied += more
                tokens = (len(running.known) + pages) * self._limits.page_size
                commands.append(self._writer.begin(running, pool, tokens, SPARE, has_ended=True))
            else:
                commands += self._release(running.key)
            if self._is_in_step(running):  # that was planned ahead: it writes there, behind what is copied
                self._vacate_after_step(running)
            else:
                self._vacate(running)  # no step writes there before the copy
        return commands

    def _has_time_for(self, tokens: int) -> bool:
        """To copy them between the step in flight and the next."""
        if self._steps.running is None:
            return True
        ends_at = self._now + 2 * self._steps.running.predicted_s + tokens * self._copy_token_s
        promises = (running.promise for running in self._residents.values())
        return all(promise.due_at(self._now) >= ends_at for promise in promises if promise.is_rt)

    def _copied_out(self, copy: Copy) -> list[Command]:
        running, pool = copy.running, self._pool
        if pool is None or not copy.wanted:
            self._writer.take_back(copy)
            return []
        self._writer.handed_on(copy)
        if self._from_pool.get(running.request.id) == running.key:
            del self._from_pool[running.request.id]
        tokens = (len(copy.known) + len(copy.pages)) * self._limits.page_size
        if copy.has_ended:
            self.num_kept_pages += len(copy.pages)
            names = self._names.pages_of(running, tokens)[len(copy.known) :]
            return [Send(pool.name, Keep(*running.key, len(copy.known), copy.pages, names))]
        self._outputs.forget([running.request.id])  # whoever gets it next has the whole output
        self._notes.moved("returned", running.key)
        names = self._names.pages_of(running, running.prefix) if self._policy.reuse else ()
        return [Send(pool.name, Commit(running.entry(copy.known + copy.pages, names), len(copy.known)))]

    def _release(self, attempt: Attempt) -> list[Command]:
        """Its pages, where the pool keeps some for it."""
        if self._pool is None or self._from_pool.get(attempt[0]) != attempt:
            return []
        del self._from_pool[attempt[0]]
        return [Send(self._pool.name, Release(*attempt))]

    def _unknown(self, asker: str, attempts: Sequence[Attempt]) -> list[Command]:
        if asker == ROUTER or self._pool is None:
            return super()._unknown(asker, attempts)
        kept = {copy.running.key for copy in self._writer.copies if copy.has_ended}  # it will hear of them
        return [Send(self._pool.name, Release(*attempt)) for attempt in attempts if attempt not in kept]
