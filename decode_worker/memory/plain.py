"""The interface of a decode worker's memory. As it stands it is plain: a block pair holds the KV of one request, or
of all that begin alike.

With Room.WHOLE a request gets the pairs for its whole possible length when it is seated, so that a resident never has
to leave for lack of memory, but best-effort ones for real-time prompts. Otherwise it gets them block by block; where
none is free a request leaves, which the scheduler names:

    resident ── pages at hand ──▶ evicted to the pool (pool_traffic.py)
       └── none ──▶ waiting, and what it had is recomputed

A memory says which request leaves; leaving.py lets it leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from alignedserve.core import WorkerLimits, units_for
from alignedserve.decode_worker.memory.folding import Folding
from alignedserve.decode_worker.requests.occupancy import Occupancy
from alignedserve.decode_worker.requests.serving_order import CandidateOrder
from alignedserve.protocol.commands import Command, CopyOut
from alignedserve.schedulers.scheduler import Scheduler
from alignedserve.scheduling.lengths import room_for
from alignedserve.worker.device import DeviceMemory, blocks_for
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace
from alignedserve.worker.page_writer import PageWriter
from alignedserve.worker.step.blocks import Blocks
from alignedserve.worker.step.device_pages import NextPages
from alignedserve.worker.step.ranks import as_they_leave
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, Seating, StepContext
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class PlainMemory(DeviceMemory):
    weighs = False  # whether it chooses, and not a scheduler, which requests have memory: by what they are worth
    keeps_places = True  # whether the KV of a request stays where it is as long as the request has its pairs

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

    def pairs_with(self, occupants: Iterable[WorkerRequest]) -> list[int]:
        return super().pairs_with((*occupants, *self._here.abandoned))

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
        seated = self.take_for(running, max(0, units_for(tokens, self.limits.block_size) - len(running.pairs)))
        self.is_stuck |= not seated
        return seated

    def seat_from_pool(self, joining: WorkerRequest, tokens: int, waiting: WaitingPrompts, now: float) -> bool:
        """Give a request memory whose KV the pool has, beside what it shares with others; return whether there was."""
        lacking = units_for(tokens, self.limits.block_size) - self.pages.num_read_of_kv(joining)
        if self.pages.page_size:
            if lacking > self.num_free:
                self.is_stuck = True
                return False
            self.pages.share_kv(joining)
        return self.seat(joining, tokens, waiting, now)

    def seat_prompt(self, prompt: WorkerRequest, waiting: WaitingPrompts, now: float) -> bool:
        """Give a prompt memory for all its tokens, beside what it shares with others; return whether there was."""
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
            self.limits.num_pairs,
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
            spare=self._need.spare_pairs(held, now, self._pace.coming.are_expected(now)) if seated else 0,
            is_open=not self.is_crowded,
            at=at,
        )

    def next_pages(self, waiting: WaitingPrompts) -> NextPages:
        """Return the pages that seated prompts compute or fetch next, for which prompts may wait."""
        return NextPages(self.pages, self._here.unfinished if waiting else ())

    def _packed_seating(self, waiting: WaitingPrompts, now: float) -> Callable[..., PackedSeating]:
        return PackedSeating

    def yielding(self, tokens: int, at: StepContext) -> list[WorkerRequest]:
        """Return the best-effort requests that leave so that a real-time one finds memory for `tokens`.

        They leave between two steps, and only where that is enough."""
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
        """Return which of the lower requests leave so that another finds memory for `tokens`, and a seat.

        The first to leave is the last of them. Return None between the ends of a step, and where all are not enough."""
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
            if running.prefix - running.kv.dropped >= len(running.kv.pairs) * size * running.kv.in_place
        ]

    def grow(self, running: WorkerRequest) -> bool:
        """Give a decode a place for its next token; return whether it has one."""
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
        """Return the step as it can run after memory was given for it, and what is to be done before it."""
        return selection, ()

    def gives_back(self, at: StepContext) -> bool:
        """Give memory back to requests that lack some of theirs; return whether one of them can run again."""
        return False

    @property
    def needs_room(self) -> bool:
        """Return whether one request has to leave where nothing can run: nothing under way gives memory back.

        Prompts that get their pairs chunk by chunk may all have some, and none enough."""
        here = self._here
        return len(here.prompts) > 1 and not (here.residents or here.kept or here.is_changing)

    def trim(self, awaits_pool: Callable[[WorkerRequest], bool]) -> list[Command]:
        """Free memory of decodes that only some layers read any more; return what the device does for that.

        `awaits_pool` says whether the pool is to get pages of a request that it has not got yet."""
        return self._folding.fold(awaits_pool)

    def step_ended(self) -> None:
        """Note that no step writes any more to memory that was left until its end."""

    # --- What other memory has to say beside (forms/memory/)

    def worth_too_little(self, waiting: WaitingPrompts, now: float) -> list[WorkerRequest]:
        """Return the decodes that leave, where it weighs, since their memory brings more elsewhere."""
        return []

    def pending_s(self, requests: Iterable[WorkerRequest]) -> float:
        """Return how long these requests have been pending in all, where it weighs."""
        return 0.0

    def seat_by_worth(self, prompts: Sequence[WorkerRequest]) -> list[WorkerRequest]:
        """Give memory to the prompts that are worth most, where it weighs, and return them."""
        return []

    @property
    def owes_best_effort(self) -> bool:
        """Return whether best-effort requests are here that lost memory and cannot run: they come before others."""
        return False

    def orders(self) -> Sequence[Command]:
        """Return what the device is to do before whatever is ordered next; once."""
        return ()

    def orders_before(self, copy: CopyOut, running: WorkerRequest) -> Sequence[Command]:
        """Return the same before this copy of a request, with what the copy needs."""
        return self.orders()

    def may_stay(self, running: WorkerRequest) -> bool:
        """Return whether a request that has ended may keep its pairs until its answer is copied."""
        return True

    def hold(self, running: WorkerRequest) -> None:
        """Let a request that has ended keep its pairs until then."""

    def pairs_for_rt(self, offered: int) -> int:
        """Return the pairs that a real-time request may find beside those that are offered to all."""
        return 0

    @property
    def held(self) -> Mapping[str, int]:
        """Return what is taken beside pairs; nothing when no request is open."""
        return {}


RECALL_S = 30.0  # in which what real-time requests needed counts half: to recompute others costs more than free memory


class RecentNeed:
    """The memory that real-time requests needed of a device lately: more of them will come."""

    def __init__(self) -> None:
        self._pairs, self._at = 0.0, 0.0

    def spare_pairs(self, held: int, now: float, more_expected: bool = True) -> int:
        """Return how many free pairs to hold back from best-effort requests: the recent real-time peak, less `held`.

        Where no more real-time requests are expected, there are none: what was needed before is forgotten.
        """
        self._pairs = max(held, self._pairs * 0.5 ** ((now - self._at) / RECALL_S)) if more_expected else held
        self._at = now
        return int(self._pairs) - held


@dataclass(slots=True)
class PackedSeating(Seating):
    """Offers real-time requests also the memory and the seats of best-effort ones."""

    best_effort: Sequence[WorkerRequest] = ()  # that are seated
    spare: int = 0  # free pairs that best-effort requests are not seated on, beside others of them
    is_open: bool = True  # to real-time requests, however many are seated
    at: StepContext = field(kw_only=True)
    _yielding: list[WorkerRequest] | None = None  # best-effort requests that have not left, the first to leave last
    _can_yield: int | None = None  # pairs

    def left_for(self, running: WorkerRequest) -> int:
        pairs = self.blocks.num_free
        if running.promise.is_rt:
            if self._can_yield is None:
                self._can_yield = sum(self.blocks.num_freed(seat.pairs) for seat in self._left())
            pairs += max(0, self._can_yield - self.pages.num_read_once(running))
        elif not running.pairs and self.best_effort:
            pairs = max(0, pairs - self.spare)
        return pairs * self.block_size

    def has_seat(self, waiting: WorkerRequest) -> bool:
        return self.seats > 0 or (self.is_open and waiting.promise.is_rt)

    def most(self, running: WorkerRequest, size: int) -> int:
        """Return how many of these tokens of a request there is memory for: none of one that left in this choice.

        Its `pairs` are others' by now. Where it gets pairs chunk by chunk it would take more, which it loses with them.
        """
        if self.by_chunk and any(left is running for left in self.displaced):
            return 0
        return Seating.most(self, running, size)

    def take(self, running: WorkerRequest, size: int) -> None:
        Seating.take(self, running, size)
        self._can_yield = None  # it may share pairs now with those that would leave

    def _left(self) -> Sequence[WorkerRequest]:
        return self.best_effort if self._yielding is None else self._yielding

    def _taken(self, count: int) -> tuple[int, ...]:
        while count > self.blocks.num_free:
            if self._yielding is None:
                self._yielding = as_they_leave(self.best_effort, self.at)
            leaving, self._can_yield = self._yielding.pop(), None
            self.blocks.give(leaving.pairs)  # its `pairs` say where its KV is until it is copied
            self.displaced.append(leaving)
        return Seating._taken(self, count)
