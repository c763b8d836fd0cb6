"""Prompts that run on a prefill worker: the next step, and what a step that has ended brings.

waiting ── a seat ──▶ prompt ──┬─▶ ended: one token was enough
                               └─▶ through: committed, or offered (handing_on.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from alignedserve.core import Chunk, Decode, FinishReason, PreemptionCause, ServiceClass, StepPlan, StepResult
from alignedserve.explain.decisions import Kind
from alignedserve.prefill_worker.buffering import Buffers
from alignedserve.prefill_worker.handing_on import Commits, Offers, PromptRequests
from alignedserve.protocol.commands import Command, SetTimer
from alignedserve.protocol.events import Received
from alignedserve.protocol.messages import Cancel
from alignedserve.schedulers.table import scheduler_of
from alignedserve.worker.arriving import Fetching, Prefixes
from alignedserve.worker.caller_shares import CallerShares
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.log import WorkerLog
from alignedserve.worker.owners import Owners
from alignedserve.worker.part import CorePart
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.step.blocks import take_blocks
from alignedserve.worker.step.device_pages import NextPages
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State
from alignedserve.worker.step.step_builder import chunk_of
from alignedserve.worker.step.view import PlannedStep, Seating, StepView
from alignedserve.worker.steps import begin_step

_ANSWER = "answer"  # timer: the next step waits no longer for the pool


@dataclass(slots=True)
class PoolSeating(Seating):
    """Seating of prompts whose KV goes to the pool.

    A best-effort prompt is seated when the pages for all its KV are at hand. A real-time prompt may take the place of
    best-effort ones that are through and wait for pages. Where there is no pool no prompt needs pages, and nowhere one
    that asks for a vector.
    """

    spare_pages: int = 0  # at hand for best-effort prompts that wait
    pages_for: Callable[[WorkerRequest], int] = field(kw_only=True)
    idle: list[WorkerRequest] = field(default_factory=list)  # best-effort prompts that are through, the newest last
    needs_pages: bool = True
    may_need_none: bool = False  # whether best-effort prompts wait that ask for a vector

    def left_for(self, running: WorkerRequest) -> int:
        blocks = self.blocks.num_free
        if self.idle and running.promise.is_rt:
            freed = sum(self.blocks.num_freed(idle.blocks) for idle in self.idle)
            blocks += max(0, freed - self.pages.num_read_once(running))
        return blocks * self.block_size

    def may_seat(self, waiting: WorkerRequest) -> bool:
        if not Seating.may_seat(self, waiting):
            return False
        if waiting.promise.is_rt or not self.needs_pages:
            return True
        return self.pages_for(waiting) <= max(0, self.spare_pages)

    @property
    def takes_best_effort(self) -> bool:
        return self.spare_pages > 0 or not self.needs_pages or self.may_need_none

    def take(self, running: WorkerRequest, size: int) -> None:
        if not running.blocks and not running.promise.is_rt:
            self.spare_pages -= self.pages_for(running)
        Seating.take(self, running, size)

    def _taken(self, count: int) -> tuple[int, ...]:
        while count > self.blocks.num_free and self.idle:
            leaving = self.idle.pop()
            self.blocks.give(take_blocks(leaving))
            self.displaced.append(leaving)
        return Seating._taken(self, count)


class NextStep:
    """Plans a step: which prompts get seats, and which chunks run."""

    def __init__(
        self,
        here: PromptRequests,
        memory: DeviceMemory,
        pool: PoolLink,
        log: WorkerLog,
        prefixes: Prefixes,
        fetching: Fetching,
        commits: Commits,
        offers: Offers,
        buffers: Buffers,
    ) -> None:
        self._scheduler = scheduler_of(memory.pace.policy)
        self._prefixes, self._decisions = prefixes, log.decisions
        self._policy, self._here, self._steps, self._pace = memory.pace.policy, here, memory.steps, memory.pace
        self._memory, self._pages, self._writer = memory, memory.pages, pool.writer
        self._queue, self._fetching, self._counts = here.queue, fetching, log.counts
        self._shares = CallerShares(memory.limits.max_batch, memory.pace, here.queue.waiting)
        self._commits, self._offers, self._buffers = commits, offers, buffers

    def make_place(self, now: float) -> list[Command]:
        """Let buffers go where the prompt that has waited longest lacks memory."""
        return self._buffers.make_place(self._queue.blocks_for_first) if self._queue.waiting else []

    def begin(self, now: float) -> list[Command]:
        """Begin the next step if none is in flight, and nothing comes before it.

        A worker hears nothing while a step runs. So a step is not begun just before it can be chosen better, or a chat
        can go on: pages that are fetched come before it in any case, and what else it waits for takes milliseconds.
        """
        if self._steps.running is not None or self._is_fetching or self._commits.is_writing_for_chat:
            return []
        answered_by = max(self._prefixes.answered_by, self._commits.answered_by)
        if now < answered_by and (self._queue.waiting or self._here.prompts):
            return [SetTimer(_ANSWER, answered_by)]
        if self._policy.is_rt_first:
            self._shares.divide([*self._here.prompts.values()])
        commands = self._seat_first_come(now)
        while True:
            selection = self._select(now)
            commands += self._seat(selection.admitted, selection.displaced, now)
            if self._is_fetching:  # the step is chosen again when the pages of these prompts are here
                return commands
            if selection.chunks or selection.decodes or not (selection.admitted or self._make_room(now)):
                break
        # A request that is recomputed has output; with one token left to compute it was chosen as a decode.
        selection.chunks += tuple(chunk_of(running, 1) for running in selection.decodes)
        return [*commands, *begin_step(self._steps, selection)]

    @property
    def _is_fetching(self) -> bool:
        return bool(self._here.among(State.FETCHING))

    def _select(self, now: float) -> PlannedStep:
        waiting = self._queue.waiting
        seating = self._seating(0 if self._memory.is_crowded else len(waiting))
        prompts, at = tuple(self._here.prompts.values()), self._pace.context(now)
        return self._scheduler.plan(StepView((), prompts, waiting, at, seating))

    def _seat_first_come(self, now: float) -> list[Command]:
        """Seat prompts that need not be chosen, while there is room. No prompt overtakes the first for memory."""
        prompts = self._queue.waiting
        if self._memory.is_stuck or not (self._policy.is_plain and prompts):
            return []
        seating = self._seating(len(self._queue.waiting))
        for running in prompts:
            if not seating.may_seat(running):
                continue
            self._queue.waiting.look(running)
            if not seating.most(running, running.num_ahead):
                break
            seating.take(running, running.num_ahead)
        self._memory.is_stuck = True  # until memory or pages come
        return self._seat(seating.admitted, seating.displaced, now)

    def _seat(self, seated: Sequence[WorkerRequest], unseated: Iterable[WorkerRequest], now: float) -> list[Command]:
        """Let the seated prompts run; the prompts that made room for them are recomputed."""
        for running in seated:
            self._queue.waiting.remove(running)
            self._fetching.seat(running)
            self._decisions.note(Kind.SEATED, running.request, tokens=running.prefix)
        commands = self._fetching.fetch(now)
        for running in unseated:
            self._writer.forget_parts(running)
            self._counts.count_preempted(running, PreemptionCause.REAL_TIME)
            winner = seated[0].request.id if seated else ""
            self._decisions.note(Kind.DISPLACED, running.request, winner, why="it is recomputed")
            self._queue.unseat(running)
        return commands

    def _seating(self, seats: int) -> PoolSeating:
        """Return how much of the device a choice may take, for this many more prompts."""
        return PoolSeating(
            self._memory.blocks,
            self._memory.limits.num_blocks,
            self._memory.limits.block_size,
            seats,
            self._memory.by_chunk(self._policy),
            self._room_for,
            self._has_long,
            spare_pages=self._commits.spare_pages if self._queue.waiting else 0,
            pages=self._pages,
            next_pages=NextPages(self._pages, self._here.unfinished if self._queue.waiting else ()),
            needs_pages=not self._offers.needs_no_pool,
            may_need_none=self._queue.waiting.num_pooled > 0,
            pages_for=self._commits.pages_for,
            idle=[running for running in self._commits.waiting if not running.promise.is_rt],
        )

    def _room_for(self, running: WorkerRequest) -> int:
        """Return how many tokens a prompt gets blocks for when it is seated as a whole."""
        return self._memory.to_hold(running, running.num_tokens)

    def _has_long(self) -> bool:
        """Return whether a long prompt is unfinished here, which it is until it is committed."""
        return any(running.num_tokens >= self._policy.long_prompt for running in self._here.occupants())

    def _make_room(self, now: float) -> bool:
        """Take the blocks of the last prompt where nothing can run, and nothing under way gives memory back."""
        if self._here.copies or self._writer.copies:
            return False
        prompts = [*self._here.prompts.values()]
        if self._commits.waiting:
            # A finished real-time prompt may wait for pages that best-effort prompts hold, and those for the memory
            # that this prompt has: so a best-effort prompt has to leave.
            prompts = [running for running in prompts if not running.promise.is_rt]
            if not prompts or self._commits.first(ServiceClass.RT) is None:
                return False
        elif len(prompts) < 2:
            return False
        leaving = self._scheduler.in_order(prompts, self._pace.context(now))[-1]
        self._counts.count_preempted(leaving, PreemptionCause.CROWDED)
        self._decisions.note(Kind.DISPLACED, leaving.request, why="it is recomputed, so that others can go on")
        self._writer.forget_parts(leaving)
        self._queue.crowd_out(leaving)
        return True


class RunningPrompts(CorePart):
    """Prompts with blocks that are not through: what the end of a step brings them, and how they leave."""

    def __init__(
        self,
        here: PromptRequests,
        memory: DeviceMemory,
        pool: PoolLink,
        log: WorkerLog,
        owners: Owners,
        commits: Commits,
    ) -> None:
        self._here, self._commits = here, commits
        self._pool, self._memory, self._writer, self._holds = pool, memory, pool.writer, pool.holds
        self._owners, self._notes, self._counts, self._decisions = owners, log.notes, log.counts, log.decisions
        self._dropping = memory.dropping

    def cancelled(self, message: Cancel, frame: Received, now: float) -> None:
        self._notes.has_less_to_run = True

    def find(self, request: str) -> WorkerRequest | None:
        return self._here.find(request)

    def end_step(self, plan: StepPlan, result: StepResult, began_at: float, now: float) -> list[Command]:
        self._notes.has_less_to_run = True
        commands: list[Command] = []
        for running, finish in self._owners.emitted(plan.chunks, result, self._here.find, began_at, now):
            if finish is None:
                self._commits.add(running)
            else:
                self._give_up(running)
                self._notes.note_end(running)
                self._counts.count_end(running)
                self._decisions.note(Kind.ENDED, running.request, tokens=len(running.output), why=finish.value)
                if finish is FinishReason.DOUBT:
                    commands += self._pool.tell_spoiled(running.known)
                commands += self._holds.release(running.key)
        return [*commands, *self._holds.release_all(self._dropping.take_let_go()), *self._owners.flush()]

    def lose(self, ran: Chunk | Decode) -> list[Command]:
        running = self._here.find(ran.request)
        if running is None or not running.is_at(ran):
            return []
        self._give_up(running)
        self._owners.outputs.drop(*running.key)
        self._notes.note("lost", running.key)
        self._decisions.note(Kind.LOST, running.request, why="the device has too little memory for a single token")
        return self._holds.release(running.key)

    def _give_up(self, running: WorkerRequest) -> None:
        self._here.move(running, State.GONE)
        self._memory.give(running.blocks)
        self._writer.forget_parts(running)

    def drop(self, request: str, attempt: int) -> list[Command]:
        dropped = self._here.drop_from((State.PROMPT,), request, attempt)
        for running in dropped:
            self._writer.forget_parts(running)
            self._memory.leave(running.blocks)
        fetched = self._here.drop_from((State.FETCHING,), request, attempt, State.ABANDONED)
        return self._holds.release_all(running.key for running in (*dropped, *fetched))
