"""The interface of a decode worker's memory. PlainMemory is plain: a block holds the KV of one request, or of all
requests that begin alike. Windows and stretches are folded (Folding).

With Room.WHOLE a request gets the blocks for its whole possible length when it is seated: a resident leaves only for a
chat's prompt. Otherwise a request gets blocks one by one; where none is free the scheduler names a request that
leaves:

    resident ── pages at hand ──▶ evicted to the pool (pool_traffic.py)
       └── none ──▶ waiting, and what it had is recomputed

A memory says which request leaves; leaving.py lets it leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from alignedserve.core import Fold, WorkerLimits, units_for
from alignedserve.decode_worker.requests.occupancy import CandidateOrder, Occupancy
from alignedserve.forms.orders import FoldKv
from alignedserve.protocol.commands import Command, CopyOut
from alignedserve.schedulers.scheduler import Scheduler
from alignedserve.scheduling.lengths import room_for
from alignedserve.worker.device import DeviceMemory, blocks_for
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace
from alignedserve.worker.pool import PageWriter
from alignedserve.worker.step.blocks import Blocks
from alignedserve.worker.step.device_pages import NextPages
from alignedserve.worker.step.ranks import as_they_leave
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, Seating, StepContext
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class PlainMemory(DeviceMemory):
    weighs = False  # whether the memory, and not a scheduler, chooses which requests have memory: by their worth
    keeps_places = True  # whether the KV of a request stays where it is as long as the request has its blocks
    decodes = True  # whether requests go on here when their prompts have run

    def __init__(
        self,
        limits: WorkerLimits,
        pace: Pace,
        steps: StepsInFlight,
        here: Occupancy,
        scheduler: Scheduler,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(limits, steps, blocks_for(limits, pace) if blocks is None else blocks)
        self._pace, self._policy, self._here = pace, pace.policy, here
        self.order = CandidateOrder(pace, here, steps)
        self.scheduler = scheduler
        self._need = RecentNeed()

    def connect(self, writer: PageWriter, pace: Pace) -> None:
        super().connect(writer, pace)
        self._writer = writer
        self._folding = Folding(self, self._here, writer, self.limits.fold if self.keeps_places else None)

    @property
    def copies_s(self) -> float:
        """Return the time of the copies to the pool that come before the next step."""
        return self._writer.num_between_steps * self._pace.copy_token_s

    def context(self, now: float) -> StepContext:
        """Return what plans depend on beside the requests."""
        at = self._pace.context(now)
        at.newest_batch = self._here.batch.number
        return at

    def blocks_with(self, occupants: Iterable[WorkerRequest]) -> list[int]:
        return super().blocks_with((*occupants, *self._here.abandoned))

    # --- Seats

    def room_for(self, running: WorkerRequest) -> int:
        """Return the tokens that a request gets memory for when it is seated."""
        tokens = room_for(running.request, len(running.output), self._policy, self.limits.num_tokens)
        return self.to_hold(running, tokens)

    def has_long(self) -> bool:
        """Return whether a long request is here: it holds up other long prompts until it ends (AccelGen §4.2)."""
        here = (*self._here.prompts.values(), *self._here.residents.values())
        return any(running.num_tokens >= self._policy.long_prompt for running in here)

    def seat(self, running: WorkerRequest, tokens: int, waiting: WaitingPrompts, now: float) -> bool:
        """Give the request memory for `tokens`; return whether there was enough."""
        seated = self.take_for(running, max(0, units_for(tokens, self.limits.block_size) - len(running.blocks)))
        self.is_stuck |= not seated
        return seated

    def seat_from_pool(self, joining: WorkerRequest, tokens: int, waiting: WaitingPrompts, now: float) -> bool:
        """Give a request memory whose KV the pool has, beside shared blocks; return whether there was enough."""
        lacking = units_for(tokens, self.limits.block_size) - self.pages.num_read_of_kv(joining)
        if self.pages.page_size:
            if lacking > self.num_free:
                self.is_stuck = True
                return False
            self.pages.share_kv(joining)
        return self.seat(joining, tokens, waiting, now)

    def seat_prompt(self, prompt: WorkerRequest, waiting: WaitingPrompts, now: float) -> bool:
        """Give a prompt memory for all its tokens, beside blocks that it shares; return whether there was enough."""
        tokens = self.room_for(prompt)
        if self.pages.page_size:
            if units_for(tokens, self.limits.block_size) - self.pages.num_read(prompt) > self.num_free:
                self.is_stuck = True
                return False
            self.pages.share(prompt)
        return self.seat(prompt, tokens, waiting, now)

    def seating(self, seats: int, waiting: WaitingPrompts, at: StepContext) -> Seating:
        """Return what the choice of a step may take: memory, and `seats`."""
        now = at.now
        offered = (
            self.blocks,
            self.limits.num_blocks,
            self.limits.block_size,
            seats,
            self.by_chunk(self._policy),
            self.room_for,
            self.has_long,
            self.pages,
            self.next_pages(waiting),
        )
        if not self._policy.is_rt_first:
            return Seating(*offered)
        seated = self._here.seated if waiting else []
        held = self.num_freed(running for running in seated if running.promise.is_rt)
        return self._packed_seating(waiting, now)(
            *offered,
            best_effort=[running for running in seated if not running.promise.is_rt],
            spare=self._need.spare_blocks(held, now, self._pace.coming.are_expected(now)) if seated else 0,
            is_open=not self.is_crowded,
            at=at,
        )

    def next_pages(self, waiting: WaitingPrompts) -> NextPages:
        """Return the pages that seated prompts compute or fetch next, for which prompts may wait."""
        return NextPages(self.pages, self._here.unfinished if waiting else ())

    def _packed_seating(self, waiting: WaitingPrompts, now: float) -> Callable[..., PackedSeating]:
        return PackedSeating

    def yielding(self, tokens: int, at: StepContext) -> list[WorkerRequest]:
        """Return the best-effort requests that leave so that a real-time request finds memory for `tokens`.

        Return none while a step runs, and where all of them are not enough."""
        if self._steps.running is not None:
            return []
        wanted, free, best_effort = units_for(tokens, self.limits.block_size), self.num_free, self._here.best_effort
        if wanted <= free or wanted > free + self.num_freed(best_effort):
            return []
        line, leaving = as_they_leave(best_effort, at), list[WorkerRequest]()
        while wanted > free:
            leaving.append(line.pop())
            free += self.num_freed(leaving[-1:])
        return leaving

    def leaving_for(
        self, tokens: int, lower: Sequence[WorkerRequest], has_seat: Callable[[int], bool]
    ) -> list[WorkerRequest] | None:
        """Return which of the `lower` requests leave, from the last one on, so that another request finds memory for
        `tokens`, and a seat. Return None while a step runs, and where all of them are not enough."""
        if self._steps.running is not None:
            return None
        line, leaving, free = [*lower], list[WorkerRequest](), self.num_free
        wanted = units_for(tokens, self.limits.block_size)
        while wanted > free or not has_seat(self._here.num_seated - len(leaving)):
            if not line:
                return None
            leaving.append(line.pop())
            free += self.num_freed(leaving[-1:])
        return leaving

    # --- The next step

    def full(self) -> list[WorkerRequest]:
        """Return the decodes without a place for their next token, in the order of their seats."""
        size, residents = self.limits.block_size, self._here.residents.values()
        return [  # most have a place, and are passed over without a call for each
            running
            for running in residents
            if running.prefix - running.kv.dropped >= len(running.kv.blocks) * size * running.kv.in_place
        ]

    def grow(self, running: WorkerRequest) -> bool:
        """Give a decode a place for its next token; return whether it has got one."""
        while not running.has_place(self.limits.block_size):
            if not self.take_for(running, 1):
                return False
        return True

    def have_grown(self) -> None:
        """Note that all decodes that could have grown."""

    @property
    def least_needed(self) -> WorkerRequest | None:
        """Return the request that leaves for lack of memory; None where the scheduler says which."""
        return None

    def runnable(self) -> tuple[Sequence[WorkerRequest], Sequence[WorkerRequest]]:
        """Return the decodes and the prompts that have all their memory."""
        return tuple(self._here.residents.values()), tuple(self._here.prompts.values())

    def settle(self, selection: PlannedStep, at: StepContext) -> tuple[PlannedStep, Sequence[Command]]:
        """Return the step as it can run with the memory that was given for it, and the commands that come before it."""
        return selection, ()

    def gives_back(self, at: StepContext) -> bool:
        """Give memory back to requests that have lost some; return whether one of them can run again."""
        return False

    @property
    def needs_room(self) -> bool:
        """Return whether one request has to leave where nothing can run, since nothing under way gives memory back.

        For example, each of two prompts that get their blocks chunk by chunk may have half of what it needs."""
        here = self._here
        return len(here.prompts) > 1 and not (here.residents or here.kept or here.is_changing)

    def trim(self, awaits_pool: Callable[[WorkerRequest], bool]) -> list[Command]:
        """Free memory of decodes that only some layers still read; return the commands for that.

        `awaits_pool` says whether pages of a request are still to be copied to the pool."""
        return self._folding.fold(awaits_pool)

    def step_ended(self) -> None:
        """Note that a step has ended, so that memory comes free that it may have written to."""

    # --- What other memory has to say beside (forms/memory/)

    def worth_too_little(self, waiting: WaitingPrompts, now: float) -> list[WorkerRequest]:
        """Return the decodes that leave because other requests are worth more, where the memory weighs."""
        return []

    def pending_s(self, requests: Iterable[WorkerRequest]) -> float:
        """Return how long these requests have been pending in all, where the memory weighs."""
        return 0.0

    def seat_by_worth(self, prompts: Sequence[WorkerRequest]) -> list[WorkerRequest]:
        """Give memory to the prompts that are worth most, where the memory weighs, and return them."""
        return []

    @property
    def owes_best_effort(self) -> bool:
        """Return whether best-effort requests here have lost memory and cannot run: they come before others."""
        return False

    def orders_before(self, copy: CopyOut, running: WorkerRequest) -> Sequence[Command]:
        """Return, once, the commands that come before this copy of a request."""
        return self.orders()

    def may_stay(self, running: WorkerRequest) -> bool:
        """Return whether a request that has ended may keep its blocks until its answer is copied."""
        return True

    def hold(self, running: WorkerRequest) -> None:
        """Let a request that has ended keep its blocks until its answer is copied."""

    def blocks_for_rt(self, offered: int) -> int:
        """Return the blocks that a real-time request may find beside those that are offered to all."""
        return 0

    @property
    def held(self) -> Mapping[str, int]:
        """Return what is taken beside blocks, by name; nothing when no request is open."""
        return {}


RECALL_S = 30.0  # after which a past need counts half: to recompute others costs more than memory that stays free


class RecentNeed:
    """The memory that real-time requests needed lately: more of them will come."""

    def __init__(self) -> None:
        self._blocks, self._at = 0.0, 0.0

    def spare_blocks(self, held: int, now: float, more_expected: bool = True) -> int:
        """Return how many free blocks to hold back from best-effort requests: the recent real-time peak, less `held`.

        Where no more real-time requests are expected, there are none: what was needed before is forgotten.
        """
        self._blocks = max(held, self._blocks * 0.5 ** ((now - self._at) / RECALL_S)) if more_expected else held
        self._at = now
        return int(self._blocks) - held


@dataclass(slots=True)
class PackedSeating(Seating):
    """Offers real-time requests also the memory and the seats of best-effort ones."""

    best_effort: Sequence[WorkerRequest] = ()  # that are seated
    spare: int = 0  # free blocks to hold back from best-effort requests
    is_open: bool = True  # to real-time requests, however many are seated
    at: StepContext = field(kw_only=True)
    _yielding: list[WorkerRequest] | None = None  # best-effort requests that have not left, the first to leave last
    _can_yield: int | None = None  # blocks

    def left_for(self, running: WorkerRequest) -> int:
        blocks = self.blocks.num_free
        if running.promise.is_rt:
            if self._can_yield is None:
                self._can_yield = sum(self.blocks.num_freed(seat.blocks) for seat in self._left())
            blocks += max(0, self._can_yield - self.pages.num_read_once(running))
        elif not running.blocks and self.best_effort:
            blocks = max(0, blocks - self.spare)
        return blocks * self.block_size

    def has_seat(self, waiting: WorkerRequest) -> bool:
        return self.seats > 0 or (self.is_open and waiting.promise.is_rt)

    def most(self, running: WorkerRequest, size: int) -> int:
        """Return for how many of these tokens of a request there is memory.

        There is none for a request that this choice has displaced: others have its blocks, and it would lose more.
        """
        if self.by_chunk and any(left is running for left in self.displaced):
            return 0
        return Seating.most(self, running, size)

    def take(self, running: WorkerRequest, size: int) -> None:
        Seating.take(self, running, size)
        self._can_yield = None  # the request may share blocks now with those that would leave

    def _left(self) -> Sequence[WorkerRequest]:
        return self.best_effort if self._yielding is None else self._yielding

    def _taken(self, count: int) -> tuple[int, ...]:
        while count > self.blocks.num_free:
            if self._yielding is None:
                self._yielding = as_they_leave(self.best_effort, self.at)
            leaving, self._can_yield = self._yielding.pop(), None
            self.blocks.give(leaving.blocks)  # `leaving.blocks` still says where to copy its KV from
            self.displaced.append(leaving)
        return Seating._taken(self, count)


MOST_FOLDS = 16  # after one step: a long prompt that has just ended delays no decode by the copy of all its blocks


class Folding:
    """Folds blocks of decodes that layers with a window or stretches no longer read, where others read all (core.Fold).

        blocks of a request   [folded] [folded]  [all layers] [all layers] [all layers] ...
        tokens                0 ─── `folded` ──┘ └─ read by all layers ──────── prefix

    Nothing is written to the old blocks: what the layers that read all keep there is copied to a free block, and the
    old blocks are given back. So other requests that share them read on, new requests find them while they are idle,
    and a step in flight may still read them. Blocks are folded only where more blocks come free than are taken. A
    beginning that others read frees none: it is folded where enough comes free of the blocks behind it.

    A prompt keeps its blocks until its first token, and until the pool has its pages if it is to get them; where memory
    is short, that is not awaited. A folded request that has to leave goes to the pool if the pool has all tokens that
    are folded, as it mostly has of prompts: only the tokens after these pages are written. Otherwise the request is
    recomputed, from what the pool has on.
    """

    def __init__(self, memory: DeviceMemory, here: Occupancy, writer: PageWriter, fold: Fold | None) -> None:
        self._size, self._here, self._memory, self._writer = memory.limits.block_size, here, memory, writer
        self._fold = fold

    def fold(self, awaits_pool: Callable[[WorkerRequest], bool]) -> list[Command]:
        """Fold blocks of the decodes here, at most MOST_FOLDS blocks after one step (PlainMemory.trim)."""
        if self._fold is None:
            return []
        folds, left, is_short = list[tuple[int, ...]](), tuple[int, ...](), self._is_short
        for running in self._here.residents.values():
            is_wanted = is_short or not awaits_pool(running)
            while len(folds) < MOST_FOLDS and is_wanted and self._is_due(running, self._fold):
                old = self._old_blocks(running, self._fold.blocks)
                if not self._is_worth(running, old, self._fold) or (into := self._memory.blocks.take(1)) is None:
                    break
                self._replace(running, into, self._fold)
                folds.append((*into, *old))
                left += old
        if not folds:
            return []
        self._memory.spare(left)  # only now: else a fold of this list could write to a block that another one reads
        return [FoldKv(tuple(folds))]

    @property
    def _is_short(self) -> bool:
        """Return whether a prompt waits for memory, or decodes may soon lack some."""
        return self._memory.num_free < len(self._here.residents) or self._here.queue.lacks_memory(only_rt=False)

    def _is_due(self, running: WorkerRequest, fold: Fold) -> bool:
        if fold.foldable(running.prefix, self._size) <= running.kv.folded or running.kv.form:
            return False
        return not (self._writer.is_writing(running) or self._writer.num_written(running))

    def _is_worth(self, running: WorkerRequest, old: tuple[int, ...], fold: Fold) -> bool:
        """Return whether folding these blocks frees more than it takes, or else folding all that may be folded.

        All are counted only at the end of a block, since others may read many of them for as long as they are here."""
        num_freed = self._memory.blocks.num_freed
        if num_freed(old) > 1:
            return True
        if running.prefix % self._size:
            return False
        count = (fold.foldable(running.prefix, self._size) - running.kv.folded) // self._size
        taken = count // fold.blocks
        return taken <= self._memory.num_free and num_freed(self._old_blocks(running, count)) > taken

    def _old_blocks(self, running: WorkerRequest, count: int) -> tuple[int, ...]:
        """Return the first `count` blocks of a request that are not folded."""
        at = self._num_folded(running)
        return running.blocks[at : at + count]

    def _num_folded(self, running: WorkerRequest) -> int:
        """Return how many blocks of a request are folded."""
        return (running.kv.folded - running.kv.dropped) // self._size

    def _replace(self, running: WorkerRequest, into: tuple[int, ...], fold: Fold) -> None:
        """Put a folded block into the place of these."""
        at, kv = self._num_folded(running), running.kv
        blocks, folded = (*kv.blocks[:at], *into, *kv.blocks[at + fold.blocks :]), kv.folded + self._size * fold.blocks
        running.kv = kv._replace(blocks=blocks, dropped=fold.spared(folded), folded=folded)
