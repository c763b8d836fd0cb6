"""Memory in which two requests may share a block (BROS §5, the memory ladder of batch-level scheduling; block_ends.py).

Before a step, and between two:

    1. real-time decodes claim a slot more: in free blocks, else from best-effort requests
    2. best-effort decodes that miss nothing claim a slot of what is free
    3. the step is chosen among the requests that have all their slots; real-time prompts that join preempt as in 1
    4. a request that has lost a slot is left out of the step; in the step no request loses a slot
    5. requests that miss slots get them back where there is room now, and run in the next step

No request leaves for a real-time request as long as best-effort requests have slots to take. No best-effort request
joins while another here lacks slots: that request was here first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from alignedserve.core import PreemptionCause
from alignedserve.cost.model import Shape
from alignedserve.forms.memory.block_ends import Side, TwoEndedBlocks
from alignedserve.forms.orders import CopySlots
from alignedserve.protocol.commands import Command, CopyOut
from alignedserve.schedulers.scheduler import Scheduler
from alignedserve.scheduling.slo import Standing, by_standing
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.memory import PlainMemory, ToLeave
from alignedserve.worker.pace import Pace
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.requests import Requests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.view import PlannedStep, StepContext
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class TwoEndedMemory(PlainMemory):
    keeps_places = False

    def __init__(self, pace: Pace, steps: StepsInFlight, here: Requests, pool: PoolLink, scheduler: Scheduler) -> None:
        super().__init__(pace, steps, here, pool, scheduler)
        self._short: set[WorkerRequest] = set()  # requests that found no slot for the next token at the last claim
        self._left: list[WorkerRequest] = []  # have left; the step in flight may still write to their blocks

    def make_blocks(self) -> TwoEndedBlocks:
        num_blocks, size = self.limits.num_blocks, self.limits.block_size
        self.slots = TwoEndedBlocks(num_blocks, size, self._policy.block_use.num_on_host(num_blocks * size))
        return self.slots

    # --- Seats

    def seat(self, running: WorkerRequest, tokens: int) -> bool:
        seated = self.slots.claim(running, side_of(running), tokens)
        self.is_stuck |= not seated
        return seated

    def seating(self, seats: int, waiting: WaitingPrompts, at: StepContext) -> Seating:
        return TwoEndedSeating(
            self.blocks,
            self.limits.num_blocks,
            self.limits.block_size,
            seats,
            False,
            self.room_for,
            slots=self.slots,
            is_open=self._policy.is_rt_first and not self.is_crowded,
            takes_any=not self.owes_best_effort,
        )

    def yielding(self, tokens: int, at: StepContext) -> list[WorkerRequest]:
        return []

    def release(self, running: WorkerRequest) -> None:
        if running.blocks:  # a request that has left for the pool has none any more
            self.slots.release(running)
            self._short.discard(running)
            self.is_stuck = self.is_crowded = False

    def release_after_step(self, running: WorkerRequest) -> None:
        if self.steps.running is None:
            self.release(running)
        else:
            self._left.append(running)

    def step_ended(self) -> None:
        for running in self._left:
            self.release(running)
        self._left.clear()
        self.slots.unpin()

    # --- The next step

    def grow(self, waiting: WaitingPrompts, now: float) -> Iterator[ToLeave]:
        """Claim a slot more for real-time decodes, which take slots of best-effort decodes, then for the rest."""
        self._begin()
        for running in [resident for resident in self._here.residents.values() if resident.promise.is_rt]:
            while running.blocks and not self._claim_next(running):
                yield self.least_needed, PreemptionCause.MEMORY
        for running in self._here.seated:
            if not running.promise.is_rt and not self.slots.has_lost(running):
                self._claim_next(running)
        self._begin()  # requests that join may take these slots again

    def _begin(self) -> None:
        """Let requests lose slots again, except ended requests with answers not copied yet."""
        self.slots.unpin()
        self.slots.pin(self._here.kept)

    def _claim_next(self, running: WorkerRequest) -> bool:
        """Claim all slots of a request, and a slot for the next token; a prompt has claimed enough."""
        claimed = self.slots.claim(running, side_of(running), running.prefix + 1)
        (self._short.discard if claimed else self._short.add)(running)
        return claimed

    def runnable(self) -> tuple[Sequence[WorkerRequest], Sequence[WorkerRequest]]:
        return self._whole(self._here.residents.values()), self._whole(self._here.prompts.values())

    def _whole(self, requests: Iterable[WorkerRequest]) -> tuple[WorkerRequest, ...]:
        """Return the requests that have all slots."""
        if self._is_plentiful:
            return tuple(requests)
        return tuple(running for running in requests if self.slots.is_whole(running, running.prefix + 1))

    @property
    def _is_plentiful(self) -> bool:
        """Return whether no request lacks anything."""
        return not self._short and not self.slots.have_lost

    def settle(self, selection: PlannedStep, at: StepContext) -> tuple[PlannedStep, Sequence[Command]]:
        """Leave out requests that have lost slots to later chosen requests; the rest lose none.

        Then requests get missing slots back, while there is room."""
        settled = self._pinned(selection)
        if settled.decodes or settled.chunks:
            self.gives_back(at)
        return settled, ()

    def _pinned(self, selection: PlannedStep) -> PlannedStep:
        decodes, chunks, find = self._whole(selection.decodes), selection.chunks, self._here.running_of
        if not self._is_plentiful:
            chunks = tuple(of for of in chunks if self.slots.is_whole(find(of), of.start + len(of.tokens)))
        self.slots.pin(decodes)
        self.slots.pin(map(find, chunks))
        if len(decodes) == len(selection.decodes) and len(chunks) == len(selection.chunks):
            return selection
        sizes = [(len(chunk.tokens), chunk.start) for chunk in chunks]
        shape = Shape.build(sizes, [running.prefix for running in decodes])
        seconds = self.pace.cost.seconds(shape)
        return replace(selection, decodes=decodes, chunks=chunks, shape=shape, predicted_s=seconds)

    def gives_back(self, at: StepContext) -> bool:
        """Give slots back to requests that lack some, where there is room; return whether any of these runs again."""
        returned = [running for running in self._as_they_return(at) if self._claim_next(running)]
        return bool(returned)

    @property
    def needs_room(self) -> bool:
        here = self._here
        is_under_way = here.kept or self._left or here.is_changing
        return bool(self.lacking()) and not is_under_way and len(here.residents) + len(here.prompts) > 1

    @property
    def least_needed(self) -> WorkerRequest:
        """Return the request to leave: best-effort before real-time, prompts before decodes, the newest first."""
        seated = self._here.seated
        return next((running for running in reversed(seated) if not running.promise.is_rt), seated[-1])

    def lacking(self) -> list[WorkerRequest]:
        """Return the requests that are here and cannot run for lack of slots."""
        if self._is_plentiful:
            return []
        return [running for running in self._here.seated if running in self._short or self.slots.has_lost(running)]

    def _as_they_return(self, at: StepContext) -> list[WorkerRequest]:
        """Return requests that lack slots in the order of the choice: of one level, the soonest restored come first
        (algorithms §1, §7)."""

        def standing(running: WorkerRequest) -> Standing:
            restore_s = self.slots.num_missing(running) * self.pace.copy_token_s
            return running.promise.standing(at.now, replace(running.work(at.chunk), transfer_s=restore_s), at.times)

        return by_standing(self.lacking(), standing, at.times, at.policy.late)

    # --- Two requests in one block

    @property
    def owes_best_effort(self) -> bool:
        return bool(self.lacking())

    def orders(self, copy: CopyOut | None = None, running: WorkerRequest | None = None) -> Sequence[Command]:
        copies, saved = self.slots.copies(), ()
        if copy is not None and running is not None:
            saved = tuple((token, place) for token, place in self.slots.saved(running) if token < len(copy.tokens))
        if copy is not None and saved:
            return (replace(copies or CopySlots(), copy=copy.number, saved=saved),)
        return () if copies is None else (copies,)

    def hold(self, running: WorkerRequest) -> bool:
        if self.slots.is_shared(running):  # in the way of another request
            return False
        self.slots.pin((running,))
        return True

    def blocks_for_rt(self, offered: int) -> int:
        return self.num_free - offered + self.slots.room_for_rt

    @property
    def held(self) -> Mapping[str, int]:
        return {"places": self.slots.num_saved}


def side_of(running: WorkerRequest) -> Side:
    return Side.LEFT if running.promise.is_rt else Side.RIGHT


@dataclass(slots=True)
class TwoEndedSeating(Seating):
    """A real-time request finds what is free, and what best-effort requests have that are in no step."""

    slots: TwoEndedBlocks = field(kw_only=True)
    is_open: bool = False  # to real-time requests, however many are seated
    takes_any: bool = True  # whether best-effort requests may join

    def left_for(self, running: WorkerRequest) -> int:
        blocks = self.slots.num_free + (self.slots.room_for_rt if running.promise.is_rt else 0)
        return blocks * self.block_size

    def has_seat(self, waiting: WorkerRequest) -> bool:
        return self.seats > 0 or (self.is_open and waiting.promise.is_rt)

    def may_seat(self, waiting: WorkerRequest) -> bool:
        return self.takes_any or waiting.promise.is_rt

    @property
    def takes_best_effort(self) -> bool:
        return self.takes_any

    def most(self, running: WorkerRequest, size: int) -> int:
        if running.blocks:
            return size
        fits = self.has_seat(running) and self.slots.fits(side_of(running), self.room_for(running))
        return size if fits else 0

    def take(self, running: WorkerRequest, size: int) -> None:
        if running.blocks:
            return
        seated = self.slots.claim(running, side_of(running), self.room_for(running))
        assert seated, "a choice took more than there was"
        self.seats -= 1
        self.admitted.append(running)


def slots_of(memory: PlainMemory) -> TwoEndedBlocks | None:
    """Return the blocks of this memory, where two requests may share a block."""
    return memory.slots if isinstance(memory, TwoEndedMemory) else None
