"""Prompts that have block pairs and are not through: they fetch what the pool knows of them, and run chunk by chunk.

seated ──▶ fetching (known pages to pairs) ──▶ running ──┬─▶ ended: one token was enough
   └── nothing known ───────────────────────────▲        └─▶ through: offered, or committed (offering.py)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from alignedserve.core import Chunk, Decode, FinishReason, StepPlan, StepResult, units_for
from alignedserve.explain.decisions import Kind
from alignedserve.prefill_worker.known_pages import KnownPages
from alignedserve.prefill_worker.offering import Offers
from alignedserve.protocol.commands import Command, CopyIn
from alignedserve.protocol.events import CopiedIn, Event
from alignedserve.protocol.messages import Attempt, Member
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.parts.prefixes import Prefixes
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.step.running import Running


class RunningPrompts(CorePart):
    def __init__(
        self,
        common: Common,
        queue: PromptQueue,
        prefixes: Prefixes,
        offers: Offers,
        known: KnownPages,
        copy_numbers: Iterator[int],
    ) -> None:
        self._pool, self._memory, self._pages, self._writer = common.pool, common.memory, common.pages, common.writer
        self._pace, self._decisions = common.pace, common.decisions
        self._owners, self._notes, self._faults = common.owners, common.notes, common.faults
        self._counts, self._dropping = common.counts, common.dropping
        self._queue, self._prefixes, self._offers, self._known = queue, prefixes, offers, known
        self._copy_numbers = copy_numbers
        self._running: dict[str, Running] = {}  # in the order of arrival
        self._fetching: dict[int, Running] = {}  # by the number of the copy
        self.num_reused_tokens = 0
        self.num_spoiled_pages = 0

    @property
    def running(self) -> Collection[Running]:
        """Return the prompts that may be in a step."""
        return self._running.values()

    @property
    def seated(self) -> list[Running]:
        """Return the prompts that have pairs, those too that fetch pages first."""
        return [*self._running.values(), *self._fetching.values()]

    @property
    def fetching(self) -> Collection[Running]:
        """Return the prompts whose first tokens are being copied from the pool."""
        return self._fetching.values()

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetching)

    def find(self, request: str) -> Running | None:
        return self._running.get(request)

    # --- Seats

    def seat(self, prompts: Iterable[Running]) -> list[Command]:
        """Let prompts run that have got pairs, after what the pool knows of them has been fetched."""
        commands: list[Command] = []
        for running in prompts:
            self._queue.waiting.remove(running)
            self._decisions.note(Kind.SEATED, running.request, tokens=running.prefix)
            if self._pages.has_to_fetch(running) and self._pool.member is not None:
                commands.append(self._fetch(running, self._pool.member))
            else:
                running.end_fetch()
                self._running[running.request.id] = running
        return commands

    def crowd_out(self, running: Running) -> None:
        """Put a running prompt back so that others can go on."""
        del self._running[running.request.id]
        self._writer.forget_parts(running)
        self._decisions.note(Kind.DISPLACED, running.request, why="it is computed anew, so that others can go on")
        self._queue.crowd_out(running)

    def _fetch(self, running: Running, pool: Member) -> Command:
        number = next(self._copy_numbers)
        self._fetching[number] = running
        self._pace.note_fetch(running)
        tokens, limits = running.tokens(0, self._tokens_in(running.known)), self._memory.limits
        pairs, pages = running.pairs[: units_for(len(tokens), limits.block_size)], running.known
        start = running.prefix  # the pages before it are here
        return CopyIn(number, pool.holder, pages[start // limits.page_size :], pairs, tokens, start)

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case CopiedIn(number, intact) if number in self._fetching:
                return self._end_fetch(self._fetching.pop(number), intact)
        return []

    def _end_fetch(self, running: Running, intact: bool) -> list[Command]:
        """Let the prompt run. KV that is not intact is computed anew, and no other request gets it."""
        self._running[running.request.id] = running
        running.end_fetch()
        self._memory.reconsider()  # another prompt may have waited for these pages
        if intact:
            tokens = max(running.prefix, self._tokens_in(running.known))  # the pool may have been lost
            self.num_reused_tokens += tokens - running.prefix
            running.prefix, running.came_with_kv = tokens, True
            self._pages.count_cached(running)
            self._pages.publish(running)
            self._dropping.drop(running)
            return self._let_go()
        pages, running.known = running.known, ()
        self.num_spoiled_pages += len(pages)
        if self._pool.member is None:
            return []
        spoiled = self._pool.tell_spoiled(pages)
        self._faults.num_refused += 1
        return [*spoiled, *self._known.release(running.key, pages)]

    def _tokens_in(self, pages: tuple[int, ...]) -> int:
        return len(pages) * self._memory.limits.page_size

    # --- Steps

    def end_step(self, plan: StepPlan, result: StepResult, began_at: float, now: float) -> list[Command]:
        self._notes.has_less_to_run = True
        commands: list[Command] = []
        for running, finish in self._owners.emitted(plan.chunks, result, self._running.get, began_at, now):
            del self._running[running.request.id]
            if finish is None:
                is_busy = bool(self._queue.waiting or self._running or self._fetching or self._prefixes.asking)
                commands += self._offers.take(running, is_busy, now)
            else:
                self._give_up(running)
                self._notes.note_end(running)
                self._counts.count_end(running)
                self._decisions.note(Kind.ENDED, running.request, tokens=len(running.output), why=finish.value)
                if finish is FinishReason.DOUBT:
                    commands += self._pool.tell_spoiled(running.known)
                commands += self._known.release(running.key, running.known)
        return [*commands, *self._let_go(), *self._owners.flush()]

    def _let_go(self) -> list[Command]:
        return [command for key in self._dropping.take_let_go() for command in self._known.let_go(key)]

    def lose(self, ran: Chunk | Decode) -> list[Command]:
        running = self._running.get(ran.request)
        if running is None or not running.is_at(ran):
            return []
        del self._running[ran.request]
        self._give_up(running)
        self._owners.outputs.drop(*running.key)
        self._notes.note("lost", running.key)
        self._decisions.note(Kind.LOST, running.request, why="the device has too little memory for a single token")
        return self._known.release(running.key, running.known)

    def _give_up(self, running: Running) -> None:
        self._memory.give(running.pairs)
        self._writer.forget_parts(running)

    # --- What is here

    def drop(self, request: str, attempt: int) -> list[Command]:
        commands: list[Command] = []
        for number, running in [*self._fetching.items()]:
            if running.is_of(request, attempt):
                del self._fetching[number]
                # Work is done in the order of its commands: the next write to the pairs comes after the copy.
                self._memory.leave(running.pairs)
                commands += self._known.leave(running)
        found = self._running.get(request)
        if found is not None and found.is_of(request, attempt):
            del self._running[request]
            self._writer.forget_parts(found)
            self._memory.leave(found.pairs)
            commands += self._known.leave(found)
        return commands

    def attempts(self) -> list[Attempt]:
        return [running.key for running in self.seated]

    def occupants(self) -> list[Running]:
        return self.seated
