"""What a scheduler sees when it plans a step, and what it answers.

Seating      the blocks of a device, and the seats for prompts that wait, that a step may take
StepView     the requests: decodes, seated prompts, prompts that wait; and the memory that the step may take
StepContext  the facts beside the requests: the time, the cost model, the limits of a step
PlannedStep  the answer: what runs, which prompts get a seat, which requests lose theirs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from alignedserve.core import Chunk, units_for
from alignedserve.cost.model import CostModel, Kind, Shape, StepEstimate
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import StepTimes
from alignedserve.worker.step.blocks import Blocks, add_blocks
from alignedserve.worker.step.device_pages import NO_NEXT_PAGES, NOTHING_SHARED, DevicePages, NextPages
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class Seating:
    blocks: Blocks
    total: int  # blocks of the device
    block_size: int  # tokens of a block
    seats: int  # requests that may be seated
    by_chunk: bool  # whether a prompt gets blocks chunk by chunk, or all that it will need at once
    room_for: Callable[[WorkerRequest], int]  # tokens that a request which is seated as a whole gets memory for
    pages: DevicePages = NOTHING_SHARED  # what requests share
    next_pages: NextPages = NO_NEXT_PAGES  # that seated prompts compute
    admitted: list[WorkerRequest] = field(default_factory=list)  # by this choice
    displaced: list[WorkerRequest] = field(default_factory=list)  # gave up blocks for `admitted`, and wait again
    # Tells whether the step has time to make K and V of this many tokens again; set by the step.
    has_time_to_project: Callable[[int], bool] = field(default=lambda _tokens: True)

    def left_for(self, _running: WorkerRequest) -> int:
        """Return how many tokens of a request there is memory for."""
        return self.blocks.num_free * self.block_size

    def has_seat(self, _waiting: WorkerRequest) -> bool:
        return self.seats > 0

    def may_seat(self, waiting: WorkerRequest) -> bool:
        """Return whether a prompt may be seated now, given memory. If not, the prompt holds up no other prompt."""
        return not self.next_pages.holds_up(waiting)

    @property
    def takes_best_effort(self) -> bool:
        """Return whether there may be a best-effort prompt that is to be seated."""
        return True

    def demand(self, running: WorkerRequest, size: int) -> int:
        """Return the memory that `size` more tokens of a request need, in tokens rounded up to blocks.

        Memory that the request has already, or shares with seated requests, is not counted. For example, a prompt
        with 20 tokens in two blocks of 16 needs 16 more for a chunk of 20 tokens.
        """
        if running.blocks and not self.by_chunk:  # most requests
            return 0
        return max(0, self._blocks_for(running, size) - self._num_held(running)) * self.block_size

    def _blocks_for(self, running: WorkerRequest, size: int) -> int:
        """Return how many blocks a request has with `size` more tokens."""
        tokens = running.num_held + size if self._grows(running) else self.room_for(running)
        return units_for(tokens, self.in_block(running))

    def _num_held(self, running: WorkerRequest) -> int:
        return len(running.blocks) or self.pages.num_read(running)

    def in_block(self, _running: WorkerRequest) -> int:
        """Return how many tokens of a request a block holds."""
        return self.block_size

    def _grows(self, running: WorkerRequest) -> bool:
        """Return whether a request gets blocks chunk by chunk.

        KV that the pool has is copied as soon as the request is seated, and needs all its blocks at once.
        """
        return self.by_chunk and bool(running.blocks or not self.pages.has_to_fetch(running))

    def most(self, running: WorkerRequest, size: int) -> int:
        """Return how many of these tokens of a request there is memory for."""
        if not running.blocks and not self.has_seat(running):
            return 0
        left = self.left_for(running)
        if self.demand(running, size) <= left:
            return size
        if not self._grows(running):
            return 0
        return max(0, self._num_held(running) * self.block_size + left - running.num_held)

    def take(self, running: WorkerRequest, size: int) -> None:
        """Take memory for `size` more tokens of a request, which `most` has found; seat a waiting request."""
        wanted = self._blocks_for(running, size)
        if not running.blocks:
            self.seats -= 1
            self.admitted.append(running)
            self.pages.share(running)
        elif not self.by_chunk:
            return
        add_blocks(running, self._taken(max(0, wanted - len(running.blocks))))
        self.next_pages.add(running)

    def _taken(self, count: int) -> tuple[int, ...]:
        blocks = self.blocks.take(count)
        assert blocks is not None, "a choice took more than there was"
        return blocks


USUAL = 0.75  # of the bound: the predicted time of a step


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class StepContext:
    """The facts that a plan depends on beside the requests."""

    now: float
    cost: CostModel
    times: StepTimes  # of this worker's steps
    room: int  # tokens of a step; fewer than there are decodes only where memory was too little for more
    block_size: int
    chunk: int  # tokens of a prompt that run in a step, on average
    policy: Policy
    pivot: int  # tokens that saturate the hardware (S_pf)
    calm_s: float = inf  # most time of a step with documents, for chats that are still to come
    firsts: Sequence[tuple[str, float]] = ()  # callers whose chats may come, with the time of their prompts alone
    joins_s: float = inf  # most time of a step with more than decodes of chats, for chats that are handed on
    newest_batch: int = 0  # of requests of about one length (AlignedServe §3.4): older batches leave first

    def careful_s(self, bound_s: float, kind: Kind = Kind.MIXED) -> float:
        """Return the most that a step of this kind is to take, as predicted, to end within the bound.

        A step whose predicted time fills the bound would be late every other time. A chat has a few dozen gaps, so
        their 99th percentile is the longest gap, and all chats share the steps: only a step in some thousands is to be
        late. Gain: 13.8 points on 17 loads, up to 74; documents -2.3 to +20.6 %.
        """
        return bound_s / (1.0 + self.cost.uncertainty[kind].beyond(USUAL * bound_s))


class StepView(NamedTuple):
    """The requests on a worker, and the memory that the next step may take."""

    decodes: Sequence[WorkerRequest]  # that may run
    prompts: Sequence[WorkerRequest]  # that have a seat and may run
    waiting: WaitingPrompts  # prompts without a seat
    at: StepContext
    seating: Seating
    here: Sequence[WorkerRequest] = ()  # all requests with memory on a decode worker, able to run or not


@dataclass(slots=True)
class PlannedStep:
    """What a scheduler decides for the next step, which runs `decodes` and `chunks`."""

    decodes: Sequence[WorkerRequest]
    chunks: tuple[Chunk, ...]
    shape: Shape
    predicted_s: float  # time of the step, by the cost model
    admitted: Sequence[WorkerRequest] = ()  # prompts that waited, and have blocks now
    displaced: Sequence[WorkerRequest] = ()  # best-effort requests that gave up blocks for `admitted`

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks and not self.admitted


def estimate_of(decodes: Iterable[WorkerRequest], at: StepContext) -> StepEstimate:
    """Return what a step of these decodes is expected to take."""
    return StepEstimate(at.cost, shape_of((), list(decodes)))


def shape_of(chunks: Sequence[Chunk], decodes: Sequence[WorkerRequest]) -> Shape:
    sizes = [(len(chunk.tokens), chunk.num_before) for chunk in chunks]
    remade = sum([running.prefix for running in decodes if running.kv.form])
    remade += sum([chunk.start for chunk in chunks if chunk.kv.form])
    return Shape.build(sizes, [running.num_held for running in decodes], remade)


def all_of(decodes: Sequence[WorkerRequest], chunks: tuple[Chunk, ...], at: StepContext) -> PlannedStep:
    """Return the selection of all that is given."""
    shape = shape_of(chunks, decodes)
    return PlannedStep(decodes, chunks, shape, at.cost.seconds(shape))
