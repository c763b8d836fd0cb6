"""What a scheduler sees when it plans a step, and what it answers.

StepView     the requests: decodes, seated prompts, prompts that wait; and memory for the step (seating.py)
RanStep      what ran last, on which turns depend
StepAhead    the step that would go on with the requests of the running step
PlannedStep  the answer: what runs, which prompts get a seat, which requests lose theirs
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.core import Chunk
from alignedserve.cost.model import Shape, StepEstimate
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

LEAST_TIMES_OTHERS = 3.0  # times the work that all others have seated: the least of a host
MOST_DOMINANT = 4  # at once
NOBODY = frozenset[str]()


class RanStep(NamedTuple):
    """The newest step that a worker has ordered, but for those in pauses."""

    number: int = 0  # of steps so far
    decodes: Sequence[WorkerRequest] = ()
    prompts: Sequence[WorkerRequest] = ()


class StepView(NamedTuple):
    """The requests on a worker, and the memory that the next step, or one in a pause, may take."""

    decodes: Sequence[WorkerRequest]  # that may run
    prompts: Sequence[WorkerRequest]  # that have a seat and may run
    waiting: WaitingPrompts  # prompts without a seat
    at: StepContext
    seating: Seating
    here: Sequence[WorkerRequest] = ()  # all requests with memory on a decode worker, able to run or not
    ran: RanStep = RanStep()
    dominant: frozenset[str] = NOBODY  # in a pause for others alone: the callers whose prompts do not run there


class StepAhead(NamedTuple):
    """The step after the running step, if the same requests go on."""

    decodes: Sequence[WorkerRequest]
    paused: Sequence[WorkerRequest]  # decodes that sit out the step
    running_s: float  # time of the running step
    predicted_s: float  # time of the step
    chunks: tuple[Chunk, ...] = ()  # of the prompts that the running step has begun, no more tokens than it has
    planned_s: float = 0.0  # time of the newest step that the scheduler planned by itself

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum([len(chunk.tokens) for chunk in self.chunks])


@dataclass(slots=True)
class PlannedStep:
    """What a scheduler decides for the next step, which runs `decodes` and `chunks`."""

    decodes: Sequence[WorkerRequest]
    chunks: tuple[Chunk, ...]
    shape: Shape
    predicted_s: float  # time of the step, by the cost model
    admitted: Sequence[WorkerRequest] = ()  # prompts that waited, and have blocks now
    displaced: Sequence[WorkerRequest] = ()  # best-effort requests that gave up blocks for `admitted`
    is_grouped: bool = False  # whether documents of other lengths sit the step out (schedulers/near_lengths.py)

    @property
    def runs(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.chunks or self.admitted)


def dominant_callers(
    seated: Sequence[WorkerRequest],
    waiting: WaitingPrompts,
    expected_chats: Sequence[tuple[str, float]],
    block_size: int,
) -> frozenset[str]:
    """Return the callers with at least three times the work, seated or waiting, that all others together have seated;
    nobody where no chats of others wait or are expected.

    Work is a block for each request with a seat, and the blocks of chats' prompts that are still to run. For example, a
    caller with 10 of 20 decodes does not dominate, and does with a waiting prompt of 30 blocks, 40 of 50. Chats that
    wait for a step of a long prompt at each token soon are most of the requests: the prompt makes its caller dominant.
    One caller dominates, or two to four, each with three times a block: among callers with a chat each nobody does.
    """
    coming = {*waiting.callers, *(caller for caller, _ in expected_chats)}
    by_salt = {running.request.salt: running.request for running in seated}  # mostly one, and asked at each step
    if not coming or len(coming.union([request.caller for request in by_salt.values()])) < 2:
        return NOBODY
    with_seat = defaultdict[str, float](float)
    for running in seated:
        with_seat[running.request.caller] += max(1.0, running.num_ahead / block_size) if running.promise.is_rt else 1
    all_seated, work = sum(with_seat.values()), dict(with_seat)
    for caller, tokens in waiting.callers.items():
        work[caller] = work.get(caller, 0.0) + tokens / block_size
    ranked = sorted(with_seat, key=work.__getitem__, reverse=True)
    for caller in ranked:
        if work[caller] >= LEAST_TIMES_OTHERS * (all_seated - with_seat[caller]):
            return frozenset((caller,)) if coming != {caller} else NOBODY
    others = all_seated
    for num, caller in enumerate(ranked[:MOST_DOMINANT], 1):
        others -= with_seat[caller]
        if work[caller] >= LEAST_TIMES_OTHERS * max(1.0, others):
            dominant = frozenset(ranked[:num])
            return dominant if coming - dominant else NOBODY
    return NOBODY


def estimate_of(decodes: Iterable[WorkerRequest], at: StepContext) -> StepEstimate:
    """Return what a step of these decodes is expected to take."""
    return StepEstimate(at.cost, shape_of((), list(decodes)))


def shape_of(chunks: Sequence[Chunk], decodes: Sequence[WorkerRequest]) -> Shape:
    sizes = [(chunk.num_computed, chunk.num_before) for chunk in chunks]
    remade = sum([running.prefix for running in decodes if running.kv.form])
    remade += sum([chunk.start for chunk in chunks if chunk.kv.form])
    return Shape.build(sizes, [running.prefix - running.kv.dropped for running in decodes], remade)


def all_of(decodes: Sequence[WorkerRequest], chunks: tuple[Chunk, ...], at: StepContext) -> PlannedStep:
    """Return the selection of all that is given."""
    shape = shape_of(chunks, decodes)
    return PlannedStep(decodes, chunks, shape, at.cost.seconds(shape))
