"""Prompts that have block pairs and are not through: they fetch what the pool knows of them, and run chunk by chunk.

seated ──▶ fetching (known pages to pairs) ──▶ running ──┬─▶ ended: one token was enough
   └── nothing known ───────────────────────────▲        └─▶ through: committed, or offered (handing_on.py)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from alignedserve.core import Chunk, Decode, FinishReason, StepPlan, StepResult, units_for
from alignedserve.explain.decisions import Kind
from alignedserve.prefill_worker.handing_on import Commits, PromptRequests
from alignedserve.protocol.commands import Command, CopyIn
from alignedserve.protocol.events import CopiedIn
from alignedserve.protocol.messages import Member
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.log import WorkerLog
from alignedserve.worker.owners import Owners
from alignedserve.worker.part import CorePart
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State


class RunningPrompts(CorePart):
    def __init__(
        self,
        here: PromptRequests,
        memory: DeviceMemory,
        pool: PoolLink,
        log: WorkerLog,
        owners: Owners,
        commits: Commits,
    ) -> None:
        self._here = here
        self._pool, self._memory, self._pages, self._writer = pool, memory, memory.pages, pool.writer
        self._pace, self._decisions = memory.pace, log.decisions
        self._owners, self._notes, self._faults = owners, log.notes, log.faults
        self._counts, self._dropping = log.counts, memory.dropping
        self._queue, self._commits, self._known = here.queue, commits, here.known
        self.num_reused_tokens = 0
        self.num_spoiled_pages = 0

    @property
    def running(self) -> Collection[WorkerRequest]:
        """Return the prompts that may be in a step."""
        return self._here.prompts.values()

    @property
    def seated(self) -> list[WorkerRequest]:
        """Return the prompts that have pairs, those too that fetch pages first."""
        return self._here.of(State.PROMPT, State.FETCHING)

    @property
    def fetching(self) -> Collection[WorkerRequest]:
        """Return the prompts whose first tokens are being copied from the pool."""
        return self._here.among(State.FETCHING)

    @property
    def is_fetching(self) -> bool:
        return bool(self.fetching)

    def find(self, request: str) -> WorkerRequest | None:
        return self._here.prompts.get(request)

    # --- Seats

    def seat(self, prompts: Iterable[WorkerRequest]) -> list[Command]:
        """Let prompts run that have got pairs, after what the pool knows of them has been fetched."""
        commands: list[Command] = []
        for running in prompts:
            self._queue.waiting.remove(running)
            self._decisions.note(Kind.SEATED, running.request, tokens=running.prefix)
            if self._pages.has_to_fetch(running) and self._pool.member is not None:
                commands.append(self._fetch(running, self._pool.member))
            else:
                running.end_fetch()
                self._here.move(running, State.PROMPT)
        return commands

    def crowd_out(self, running: WorkerRequest) -> None:
        """Put a running prompt back so that others can go on."""
        self._writer.forget_parts(running)
        self._decisions.note(Kind.DISPLACED, running.request, why="it is computed anew, so that others can go on")
        self._queue.crowd_out(running)

    def _fetch(self, running: WorkerRequest, pool: Member) -> Command:
        number = self._here.begin_copy(running, State.FETCHING)
        self._pace.note_fetch(running)
        tokens, limits = running.tokens(0, self._tokens_in(running.known)), self._memory.limits
        pairs, pages = running.pairs[: units_for(len(tokens), limits.block_size)], running.known
        start = running.prefix  # the pages before it are here
        return CopyIn(number, pool.holder, pages[start // limits.page_size :], pairs, tokens, start)

    def copied_in(self, event: CopiedIn, now: float) -> list[Command]:
        running = self._here.end_copy(event.number, State.FETCHING)
        return [] if running is None else self._end_fetch(running, event.intact)

    def _end_fetch(self, running: WorkerRequest, intact: bool) -> list[Command]:
        """Let the prompt run. KV that is not intact is computed anew, and no other request gets it."""
        self._here.move(running, State.PROMPT)
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
        pages = running.known
        running.forget_known()
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
        for running, finish in self._owners.emitted(plan.chunks, result, self._here.prompts.get, began_at, now):
            if finish is None:
                self._commits.add(running)
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
        running = self._here.prompts.get(ran.request)
        if running is None or not running.is_at(ran):
            return []
        self._give_up(running)
        self._owners.outputs.drop(*running.key)
        self._notes.note("lost", running.key)
        self._decisions.note(Kind.LOST, running.request, why="the device has too little memory for a single token")
        return self._known.release(running.key, running.known)

    def _give_up(self, running: WorkerRequest) -> None:
        self._here.move(running, State.GONE)
        self._memory.give(running.pairs)
        self._writer.forget_parts(running)

    # --- What is here

    def drop(self, request: str, attempt: int) -> list[Command]:
        # Work is done in the order of its commands: the next write to the blocks comes after a copy that is under way.
        dropped = self._here.drop_from((State.FETCHING, State.PROMPT), request, attempt)
        for running in dropped:
            self._writer.forget_parts(running)
            self._memory.leave(running.pairs)
        return [command for running in dropped for command in self._known.leave(running)]
