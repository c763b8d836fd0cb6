"""Memory in which two requests may share a block (BROS §5, the memory ladder of batch-level scheduling; block_ends.py).

Before a step:

    1. real-time decodes claim a slot more: in free blocks, else from best-effort requests
    2. best-effort decodes that miss nothing claim a slot of what is free
    3. the step is chosen among the requests that have all their slots; real-time prompts that join preempt as in 1
    4. a request that has lost a slot by that is left out of the step; in the step no request loses a slot
    5. requests that miss slots get them back where there is room now, and run in the next step

No request leaves for a real-time request as long as best-effort requests have slots to take. No best-effort request
joins while another here misses slots: that request was here first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from alignedserve.core import PreemptionCause
from alignedserve.papers.memory.block_ends import TwoEndedBlocks
from alignedserve.protocol.commands import Command, CopyOut
from alignedserve.protocol.form_orders import CopySlots
from alignedserve.worker.memory import MemoryChange, PlainMemory, Preempted
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.states import State
from alignedserve.worker.step.view import PlannedStep, shape_of
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class TwoEndedMemory(PlainMemory):
    runs_amid = False

    def make_blocks(self) -> TwoEndedBlocks:
        num_blocks, size = self.limits.num_blocks, self.limits.block_size
        num_places = self._policy.block_use.num_on_host(num_blocks * size)
        self.slots = TwoEndedBlocks(num_blocks, size, num_places, self._preemptable)
        return self.slots

    def _preemptable(self) -> Sequence[WorkerRequest]:
        """Return the requests that may lose slots, the newest first: what is in the step in flight may not."""
        step = self.steps.running
        in_step = () if step is None else {part.request for part in step.parts}
        return [running for running in reversed(self._here.seated) if running.request.id not in in_step]

    @property
    def num_free(self) -> int:
        """Return the blocks for requests that join: none while a request here misses slots."""
        return 0 if self.slots.cuts else self.slots.num_free

    # --- Seats

    def seat(self, running: WorkerRequest, tokens: int, is_dry: bool = False) -> bool:
        """Give the request memory for `tokens`, or only return whether there is enough."""
        is_rt = running.promise.is_rt
        seated = (is_rt or not self.slots.cuts) and self.slots.claim(running, is_rt, tokens, is_dry)
        self.is_stuck |= not (seated or is_dry)
        return seated

    def seating(self, seats: int, waiting: WaitingPrompts, at: StepContext) -> Seating:
        limits, is_open = self.limits, self._policy.is_rt_first and not self.is_crowded
        of = self.blocks, limits.num_blocks, limits.block_size, seats, False, self.room_for
        return TwoEndedSeating(*of, slots=self.slots, seat=self.seat, is_open=is_open)

    def yielding(self, tokens: int, at: StepContext) -> list[WorkerRequest]:
        return []

    # --- The next step

    def grow(self, waiting: WaitingPrompts, now: float) -> Iterator[MemoryChange]:
        """Claim a slot more for real-time decodes, which take slots of best-effort decodes."""
        for running in [resident for resident in self._here.residents.values() if resident.promise.is_rt]:
            while running.blocks and not self._claim_next(running):
                yield Preempted(PreemptionCause.MEMORY, self._least_needed)

    def _claim_next(self, running: WorkerRequest) -> bool:
        """Claim all slots of a request, and a slot for the next token; a prompt has claimed enough."""
        return self.slots.claim(running, running.promise.is_rt, running.prefix + 1)

    def runnable(self) -> tuple[Sequence[WorkerRequest], Sequence[WorkerRequest]]:
        """Return the decodes and the prompts that have all their slots; if there are none, these get slots back."""
        seated, losers = self._here.seated, self.slots.losers
        whole = [running for running in seated if running not in losers and self._claim_next(running)]
        whole = whole or [*filter(self._claim_next, seated)]
        decodes = [running for running in whole if running.state is State.RESIDENT]
        return decodes, whole[len(decodes) :]

    def settle(self, selection: PlannedStep, at: StepContext) -> tuple[PlannedStep, Sequence[Command]]:
        """Leave out requests that have lost slots to later chosen requests. Then requests get slots back, while there
        is room."""
        losers = self.slots.losers
        decodes = [running for running in selection.decodes if running not in losers]
        chunks = tuple([chunk for chunk in selection.chunks if self._here.running_of(chunk) not in losers])
        if len(decodes) + len(chunks) < len(selection.decodes) + len(selection.chunks):
            shape = shape_of(chunks, decodes)
            seconds = self.pace.cost.seconds(shape)
            selection = replace(selection, decodes=decodes, chunks=chunks, shape=shape, predicted_s=seconds)
        if decodes or chunks:
            for running in self._here.seated:
                if running in losers:
                    self._claim_next(running)
        return selection, ()

    def crowded(self, at: StepContext) -> WorkerRequest | None:
        here = self._here
        if len(here.seated) < 2 or here.kept or here.is_changing or all(map(self._claim_next, here.seated)):
            return None
        return self._least_needed

    @property
    def _least_needed(self) -> WorkerRequest:
        """Return the request to leave: best-effort before real-time, prompts before decodes, the newest first."""
        seated = self._here.seated
        return next((running for running in reversed(seated) if not running.promise.is_rt), seated[-1])

    # --- Two requests in one block

    def orders(self, copy: CopyOut | None = None, running: WorkerRequest | None = None) -> Sequence[Command]:
        copies = self.slots.copies.take()
        saved = () if copy is None or running is None else self.slots.saved(running, len(copy.tokens))
        return [*copies, CopySlots(copy=copy.number, saved=saved)] if copy is not None and saved else copies

    def blocks_for_rt(self, offered: int) -> int:
        return self.slots.num_free - offered + self.slots.room_for_rt


@dataclass(slots=True)
class TwoEndedSeating(Seating):
    """A real-time request finds what is free, and what best-effort requests have that are in no step."""

    slots: TwoEndedBlocks = field(kw_only=True)
    seat: Callable[..., bool] = field(kw_only=True)  # TwoEndedMemory.seat
    is_open: bool = False  # to real-time requests, however many are seated

    def has_seat(self, waiting: WorkerRequest) -> bool:
        return self.seats > 0 or (self.is_open and waiting.promise.is_rt)

    def left_for(self, running: WorkerRequest) -> int:
        if running.promise.is_rt:
            return (self.slots.num_free + self.slots.room_for_rt) * self.block_size
        return 0 if self.slots.cuts else self.slots.num_free * self.block_size

    def most(self, running: WorkerRequest, size: int) -> int:
        fits = running.blocks or (self.has_seat(running) and self.seat(running, self.room_for(running), is_dry=True))
        return size if fits else 0

    def take(self, running: WorkerRequest, size: int) -> None:
        if not running.blocks:
            seated = self.seat(running, self.room_for(running))
            assert seated, "a choice took more than there was"
            self.seats -= 1
            self.admitted.append(running)
