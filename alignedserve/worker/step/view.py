"""What a scheduler sees when it plans a step, and what it answers.

StepView     the requests: decodes, seated prompts, prompts that wait; and the memory that the step may take
StepContext  the facts beside the requests: the time, the cost model, the limits of a step
Selection    the answer: what runs, which prompts got a seat, which requests lost theirs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from alignedserve.core import Chunk
from alignedserve.cost.model import CostModel, Kind, Shape, StepEstimate
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import StepTimes
from alignedserve.worker.step.decode_order import DecodeOrder
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


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
    batch: int = 1 << 30  # most requests of the step (B_curr, BROS §4.2)
    seated: DecodeOrder | None = None  # keeps decodes in their order, where they are more than that
    calm_s: float = inf  # most time of a step with documents, for chats that are still to come
    joins_s: float = inf  # most time of a step with more than decodes of chats, for chats that are handed on

    def caution(self, kind: Kind = Kind.MIXED) -> float:
        """Return by which factor the predicted time of a step of this kind is to be less than its bound.

        A step whose predicted time fills its bound would be late every other time. The 99th percentile of the few
        dozen gaps of a chat is the longest of them, and all chats share their steps: one step in some thousands is to
        be late.
        """
        return 1.0 + self.cost.uncertainty[kind].beyond


class StepView(NamedTuple):
    """The requests on a worker, and the memory that its next step may take."""

    decodes: Sequence[Running]  # that may run
    prompts: Sequence[Running]  # that have a seat and may run
    waiting: WaitingPrompts  # prompts without a seat
    at: StepContext
    seating: Seating
    here: Sequence[Running] = ()  # all requests with memory on a decode worker, whether they may run or not

    def kept(self) -> DecodeOrder | None:
        """Return the decodes in their order as it is now, where they are more than a step has places for."""
        at, kept = self.at, self.at.seated
        if kept is not None and len(self.decodes) > at.batch:
            kept.refresh(self.decodes, at.now, at.times)
            return kept
        if kept is not None:
            kept.forget()
        return None


@dataclass(slots=True)
class Selection:
    """The requests and chunks that the next step runs."""

    decodes: Sequence[Running]
    chunks: tuple[Chunk, ...]
    shape: Shape
    predicted_s: float
    seated: Sequence[Running] = ()  # prompts that waited: they have their pairs now
    unseated: Sequence[Running] = ()  # best-effort requests that gave up their pairs for these
    ran_out_of_time: bool = False  # whether there was more to run, and no time for it

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks and not self.seated


def estimate_of(decodes: Iterable[Running], at: StepContext) -> StepEstimate:
    """Return what a step of these decodes is expected to take."""
    return StepEstimate(at.cost, shape_of((), list(decodes)))


def shape_of(chunks: Sequence[Chunk], decodes: Sequence[Running]) -> Shape:
    sizes = [(len(chunk.tokens), chunk.start - chunk.dropped) for chunk in chunks]
    hidden = sum([running.prefix for running in decodes if running.blocks])
    hidden += sum([chunk.start for chunk in chunks if chunk.blocks])
    return Shape.build(sizes, [running.prefix - running.dropped for running in decodes], hidden)


def all_of(decodes: Sequence[Running], chunks: tuple[Chunk, ...], at: StepContext) -> Selection:
    """Return the selection of all that is given."""
    shape = shape_of(chunks, decodes)
    return Selection(decodes, chunks, shape, at.cost.seconds(shape))
