"""The memory of a worker's device, and the interface by which papers/memory/ plugs in others. PlainMemory is plain: a
block holds the KV of one request, or of all requests that begin alike. What windows no longer read is in windows.py.

With Room.WHOLE a request gets the blocks for its whole possible length with its seat: a resident leaves only for a
chat's prompt. Otherwise a request gets blocks one by one; where no block is free, the scheduler names a request that
leaves:

    resident ── pages at hand ──▶ evicted to the pool (pool_traffic.py)
       └── none ──▶ waiting, and recomputed

A memory says which request leaves; leaving.py takes its seat.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from alignedserve.core import Entry, PreemptionCause, units_for
from alignedserve.protocol.commands import Command, CopyOut
from alignedserve.scheduling.lengths import room_for
from alignedserve.scheduling.policy import Room
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.requests import Requests
from alignedserve.worker.scheduler import NO_LIMIT, Scheduler
from alignedserve.worker.step.blocks import Blocks, NamedBlocks, add_blocks, keep_as, lose_kv, take_blocks
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.device_pages import DevicePages, NextPages
from alignedserve.worker.step.ranks import as_they_leave, in_order
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.seating import PackedSeating, RecentNeed, Seating
from alignedserve.worker.step.view import PlannedStep
from alignedserve.worker.step.waiting_prompts import WaitingPrompts
from alignedserve.worker.windows import Dropping, Folding


class Preempted(NamedTuple):
    """A request is to leave."""

    cause: PreemptionCause
    request: WorkerRequest | None = None  # None: the scheduler says which


class Seated(NamedTuple):
    """A prompt takes a seat."""

    prompt: WorkerRequest


MemoryChange: TypeAlias = Preempted | Seated


class PlainMemory:
    decodes = True  # whether requests go on here after their prompts
    runs_amid = True  # whether a step may run in a pause of another, as the device has nothing else to do for it first
    copies_beside: bool  # whether copies from the pool go on beside steps; DecodeCore says so

    def __init__(self, pace: Pace, steps: StepsInFlight, here: Requests, pool: PoolLink, scheduler: Scheduler) -> None:
        self.limits, self.pace, self.steps, self._here, self._writer = pace.limits, pace, steps, here, pool.writer
        self._policy, self.scheduler = pace.policy, scheduler
        # Whether KV stays in place as long as the request has its blocks.
        self.keeps_places = pace.policy.block_use.keeps_places or not self.decodes
        self.blocks = self.make_blocks()
        # Requests share full pages by the pool's names for the pages.
        limits, writer = pace.limits, pool.writer
        size, page_size = limits.block_size, limits.page_size
        name, drops = writer.names.blocks_of, limits.reach is not None
        self.pages = DevicePages(self.blocks, size, page_size, name, pace.fetch_s, limits.unread, drops)
        self.dropping = Dropping(self, writer)
        folds = self.keeps_places and self.decodes  # without decodes all leave, and what is folded could not
        self.folding = Folding(self, here, writer, limits.fold if folds else None)
        self._need = RecentNeed()
        self.is_stuck = False  # the first waiting prompt could not be seated, and nothing has changed since
        self.is_crowded = False  # a prompt had to leave for others: no prompt is seated before memory is free

    def make_blocks(self) -> Blocks:
        """Return the blocks of a device, which keeps computed KV for later requests if the policy reuses KV."""
        num_blocks, size, pace = self.limits.num_blocks, self.limits.block_size, self.pace

        def cost_s(is_in_pool: bool) -> float:
            return size * (pace.copy_token_s if is_in_pool else pace.prompt_token_s)

        return NamedBlocks(num_blocks, cost_s) if self._policy.reuse else Blocks(num_blocks)

    def context(self, now: float) -> StepContext:
        """Return what plans depend on beside the requests."""
        at = self.pace.context(now)
        at.newest_batch = self._here.batch.number
        return at

    # --- Blocks

    @property
    def num_free(self) -> int:
        return self.blocks.num_free

    @property
    def free_share(self) -> float:
        """Return the share of the device's blocks that is free."""
        return self.blocks.num_free / self.limits.num_blocks

    def orders(self, copy: CopyOut | None = None, running: WorkerRequest | None = None) -> Sequence[Command]:
        """Return, once, what the device is to do before whatever is ordered next: a copy of a request, if it is one."""
        return ()

    @property
    def by_chunk(self) -> bool:
        """Return whether prompts get blocks chunk by chunk, as they must where requests give blocks back."""
        return self._policy.room is Room.CHUNKS or self.limits.reach is not None

    def to_hold(self, running: WorkerRequest, tokens: int) -> int:
        """Return for how many of `tokens` a request gets memory when all its memory comes with the seat."""
        dropped = running.kv.dropped
        begun = max(running.prefix + 1, running.fetched_to) - dropped
        return max(begun, self.limits.least_held(tokens - dropped))

    def release_unused(self, blocks: tuple[int, ...]) -> None:
        """Free blocks that a running request no longer needs. The crowded flag stays: it will need as many again
        soon, so prompts wait until another request has ended."""
        is_crowded = self.is_crowded
        self.leave(blocks)
        self.is_crowded = is_crowded

    def num_freed(self, leaving: Iterable[WorkerRequest]) -> int:
        """Return the least number of blocks that come free if all of these requests leave."""
        return sum([self.blocks.num_freed(running.blocks) for running in leaving])

    def reconsider(self) -> None:
        """Let the first waiting prompt try again to get a seat, because something has changed."""
        self.is_stuck = False

    def give(self, blocks: tuple[int, ...]) -> None:
        """Free blocks that no step writes to. A copy of them may still wait for the end of the running step: no step in
        a pause may write to them, so the running step pauses no more."""
        self.blocks.give(blocks)
        self.steps.close_to_pauses()
        self.is_stuck = self.is_crowded = False

    def leave(self, blocks: tuple[int, ...]) -> None:
        """Free blocks when the steps in flight, which may still write there, have ended."""
        if not self.steps.leave(blocks):
            self.give(blocks)

    def release(self, running: WorkerRequest) -> None:
        """Free the blocks of a request that no step writes to."""
        self.give(take_blocks(running))

    def release_behind_copy(self, running: WorkerRequest) -> None:
        """Free the blocks of a request whose copy has been ordered: later writes to the blocks come after the copy.

        A step in a pause would write before the copy, which waits for the step that pauses. So where the running step
        may pause, the blocks come free when that step has ended."""
        if self.steps.takes_amid:
            self.leave(take_blocks(running))
        else:
            self.release(running)

    def lose(self, running: WorkerRequest) -> None:
        """Free the blocks of a request that no step writes to; the KV is lost, and the request is recomputed."""
        self.release(running)
        lose_kv(running)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Return `count` blocks that were free; None where fewer are."""
        return self.blocks.take(count)

    def take_for(self, running: WorkerRequest, count: int) -> bool:
        """Give a request `count` more blocks, and return whether that many were free."""
        blocks = self.take(count)
        if blocks is not None:
            add_blocks(running, blocks)
        return blocks is not None

    def note_replaced(self, running: WorkerRequest) -> None:
        """Note that the choice of a step has given the blocks of a request to others."""
        take_blocks(running)

    def release_after_step(self, running: WorkerRequest) -> None:
        """Free the blocks of a request when the steps in flight have ended."""
        self.leave(running.blocks)

    def resume(self, running: WorkerRequest, entry: Entry) -> None:
        """Note the progress of a request elsewhere; the request has no blocks here."""
        keep_as(running, entry.kv)
        running.resume(entry, self.limits.page_size)

    # --- Seats

    def room_for(self, running: WorkerRequest) -> int:
        """Return for how many tokens a request gets memory with its seat."""
        tokens = room_for(running.request, len(running.output), self._policy, self.limits.num_tokens)
        return self.to_hold(running, tokens)

    def seat(self, running: WorkerRequest, tokens: int) -> bool:
        """Give the request memory for `tokens`; return whether there was enough."""
        seated = self.take_for(running, max(0, units_for(tokens, self.limits.block_size) - len(running.blocks)))
        self.is_stuck |= not seated
        return seated

    def seat_beside_others(self, running: WorkerRequest, has_kv: bool = False) -> bool:
        """Give a request memory for all its tokens, beside shared blocks; return whether there was enough.

        `has_kv` says that the pool has KV of all the tokens: the request is no prompt."""
        tokens, pages = self.room_for(running), self.pages
        if pages.page_size:
            if units_for(tokens, self.limits.block_size) - pages.num_shared(running, has_kv) > self.num_free:
                self.is_stuck = True
                return False
            add_blocks(running, pages.share(running, has_kv))
        return self.seat(running, tokens)

    def seating(self, seats: int, waiting: WaitingPrompts, at: StepContext) -> Seating:
        """Return what the choice of a step may take: memory, and `seats`."""
        now, limits, pages = at.now, self.limits, (self.pages, self.next_pages(waiting))
        offered = self.blocks, limits.num_blocks, limits.block_size, seats, self.by_chunk, self.room_for, *pages
        if not self._policy.is_rt_first:
            return Seating(*offered)
        seated = self._here.seated if waiting else []
        held = self.num_freed(running for running in seated if running.promise.is_rt)
        return PackedSeating(
            *offered,
            best_effort=[running for running in seated if not running.promise.is_rt],
            spare=self._need.spare_blocks(held, now, self.pace.coming.are_expected(now)) if seated else 0,
            is_open=not self.is_crowded,
            as_they_leave=partial(as_they_leave, at=at),
        )

    def seating_amid(self, waiting: WaitingPrompts) -> Seating:
        """Return what a step in a pause may take: free memory, and nothing of the step that pauses. A chat gets a seat
        however many are taken, as between steps."""
        limits, pages, seats = self.limits, (self.pages, self.next_pages(waiting)), 0 if self.is_crowded else NO_LIMIT
        return Seating(self.blocks, limits.num_blocks, limits.block_size, seats, self.by_chunk, self.room_for, *pages)

    def next_pages(self, waiting: WaitingPrompts) -> NextPages:
        """Return the pages that seated prompts compute or fetch next, for which prompts may wait."""
        return NextPages(self.pages, self._here.unfinished if waiting else ())

    def yielding(self, tokens: int, at: StepContext) -> list[WorkerRequest]:
        """Return the best-effort requests that leave so that a real-time request finds memory for `tokens`.

        Return none while a step runs, and where all best-effort requests together have too little. Then they are not
        sorted either: sorting counts missed promises."""
        wanted, best_effort = units_for(tokens, self.limits.block_size), self._here.best_effort
        if self.steps.running is not None or not 0 < wanted - self.num_free <= self.num_freed(best_effort):
            return []
        return self.leaving_for(tokens, as_they_leave(best_effort, at)) or []

    def leaving_for(
        self, tokens: int, lower: Sequence[WorkerRequest], most_seated: int = NO_LIMIT
    ) -> list[WorkerRequest] | None:
        """Return which of the `lower` requests leave, from the last one on, so that another request finds memory for
        `tokens`, and a seat. Return None while a step runs, and where all `lower` together have too little."""
        if self.steps.running is not None:
            return None
        line, leaving, free = [*lower], list[WorkerRequest](), self.num_free
        wanted = units_for(tokens, self.limits.block_size)
        while wanted > free or self._here.num_seated - len(leaving) >= most_seated:
            if not line:
                return None
            leaving.append(line.pop())
            free += self.num_freed(leaving[-1:])
        return leaving

    # --- The next step

    @property
    def _decodes(self) -> Collection[WorkerRequest]:
        return self._here.residents.values() if self.decodes else ()

    def grow(self, waiting: WaitingPrompts, now: float) -> Iterator[MemoryChange]:
        """Give each decode a place for its next token, in the order of seats. Where there is none, yield which request
        is to leave before the next decode is looked at, and which prompt takes a seat."""
        if self._policy.grows:
            yield from self._grow()

    def _grow(self) -> Iterator[MemoryChange]:
        size = self.limits.block_size
        full = [  # most have a place, and are passed over without a call for each
            running
            for running in self._decodes
            if running.prefix - running.kv.dropped >= len(running.kv.blocks) * size * running.kv.in_place
        ]
        for running in full:
            while running.blocks and not running.kv.has_place(running.prefix, size):
                if not self.take_for(running, 1):
                    yield Preempted(PreemptionCause.MEMORY)

    def runnable(self) -> tuple[Sequence[WorkerRequest], Sequence[WorkerRequest]]:
        """Return the decodes and the prompts that lack no memory."""
        return tuple(self._decodes), tuple(self._here.prompts.values())

    def settle(self, selection: PlannedStep, at: StepContext) -> tuple[PlannedStep, Sequence[Command]]:
        """Return the step as it can run with the memory that was given, and the commands that come before the step."""
        return selection, ()

    def crowded(self, at: StepContext) -> WorkerRequest | None:
        """Return the request to leave where nothing can run, and nothing under way gives memory back.

        For example, two prompts that get blocks chunk by chunk may have 50 blocks each where each needs 100."""
        here = self._here
        if len(here.prompts) < 2 or here.residents or here.kept or here.is_changing:
            return None
        return in_order(here.prompts.values(), at)[-1]

    def blocks_for_rt(self, offered: int) -> int:
        """Return the blocks that a real-time request may find beyond the blocks offered to all."""
        return 0
