"""What a step may take: R, which the tightest real-time request leaves for it, and the budget of prompt tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf

from alignedserve.core import Chunk
from alignedserve.cost.model import CostModel, Kind, Shape, StepEstimate
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.scheduling.slo import Late, StepTimes, step_room_s
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seated import Seated
from alignedserve.worker.step.waiting import Waiting

_ROUNDING_S = 1e-9  # slack is kept as an instant
_AT_A_TIME = 32  # decodes that are looked at


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class Moment:
    """What a choice depends on beside the requests."""

    now: float
    cost: CostModel
    times: StepTimes  # of this worker's steps
    room: int  # tokens of a step; fewer than there are decodes only where memory was too little for more
    block_size: int
    chunk: int  # tokens of a prompt that run in a step, on average
    policy: Policy
    pivot: int  # tokens that saturate the hardware (S_pf)
    batch: int = 1 << 30  # most requests of the step (B_curr, BROS §4.2)
    seated: Seated | None = None  # decodes, where they are more than that
    calm_s: float = inf  # most time of the step, for real-time requests that are still to come


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class Selection:
    decodes: Sequence[Running]
    chunks: tuple[Chunk, ...]
    shape: Shape
    predicted_s: float
    seated: Sequence[Running] = ()  # of those that waited: they have their pairs now
    unseated: Sequence[Running] = ()  # best-effort ones that gave theirs up for these
    stopped_on_time: bool = False  # whether there was more to run, and no time for it

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks and not self.seated


def estimate_of(decodes: Iterable[Running], at: Moment) -> StepEstimate:
    return StepEstimate(at.cost, shape_of((), list(decodes)))


def shape_of(chunks: Sequence[Chunk], decodes: Sequence[Running]) -> Shape:
    sizes = [(len(chunk.tokens), chunk.start) for chunk in chunks]
    hidden = sum([one.prefix for one in decodes if one.blocks]) + sum([one.start for one in chunks if one.blocks])
    return Shape.of(sizes, [one.prefix for one in decodes], hidden)


def all_of(decodes: Sequence[Running], chunks: tuple[Chunk, ...], at: Moment) -> Selection:
    shape = shape_of(chunks, decodes)
    return Selection(decodes, chunks, shape, at.cost.seconds(shape))


@dataclass(frozen=True, slots=True)
class Bounds:
    """R: the most time that the coming step may take."""

    decodes_s: float = inf  # for real-time decodes, so that none of them is late
    all_s: float = inf  # for real-time prompts too, those that are here and those that are still to come


_UNBOUNDED = Bounds()


def step_bounds(
    decodes: Sequence[Running], prompts: Iterable[Running], waiting: Waiting, at: Moment, kept: Seated | None = None
) -> Bounds:
    """R. Nothing is sorted or made here: this runs at every step over all that is on the worker.

    `kept`: these decodes in their order, of which the first are enough.

    A prompt that cannot make it beside the real-time decodes does not bind: they would be late for it, or it in vain.
    """
    if at.policy.chunking is not Chunking.SLO or at.policy.as_in_paper:
        return _UNBOUNDED
    if at.policy.late is Late.DROP_LAST:  # who is late runs behind the others, and in nothing of what is theirs
        decodes, kept = [one for one in decodes if not one.promise.is_late(at.now)], None
    bound, late_s = _decodes_bound_s(decodes, at) if kept is None else _kept_bound_s(kept, at)
    if kept is not None and (late_s < bound or prompts or waiting):
        decodes = kept.real_time(at.batch)  # more of them run in no step
    # One step that takes longer than was predicted makes all late at once. Their next tokens can be in time again.
    if late_s < bound and estimate_of([one for one in decodes if one.promise.is_rt], at).seconds <= late_s:
        bound = late_s
    prompts_s = _prompts_bound_s(decodes, prompts, waiting, at) if prompts or waiting else inf
    return Bounds(bound, min(bound, prompts_s, at.calm_s))


def _decodes_bound_s(decodes: Iterable[Running], at: Moment) -> tuple[float, float]:
    """Of those that are in time, and the least time between two tokens that was promised to one that is not."""
    bound, late_s, now, mean_s = inf, inf, at.now, at.times.mean_s
    (least_s, prefix_s), hidden_s = at.cost.one_decode, at.cost.hidden_token_s
    for running in decodes:
        if (dues := running.promise.dues) is not None:
            alone_s = least_s + (prefix_s + hidden_s if running.blocks else prefix_s) * running.prefix
            room_s = step_room_s(dues, now, dues.num_left, mean_s, alone_s)
            if room_s < bound:
                bound = room_s
            if dues.num_missed:
                late_s = min(late_s, running.request.slo.tbt_s)
    return bound, late_s


def _kept_bound_s(kept: Seated, at: Moment) -> tuple[float, float]:
    """The same, of the first few at a time. Whoever ran in the same step is due at the same moment: those that are due
    no sooner than the bound cannot lower it."""
    bound, in_time = inf, kept.in_time(at.times.mean_s)
    while some := list(islice(in_time, _AT_A_TIME)):
        bound = min(bound, _decodes_bound_s([running for _, running in some], at)[0])
        if some[-1][0] - at.now + _ROUNDING_S > bound:
            break
    return bound, kept.least_missed_s


def caution(at: Moment, kind: Kind = Kind.MIXED) -> float:
    """What a step may be predicted to take is by this factor less than what it may take.

    A step whose predicted time fills R would be late every other time. The 99th percentile of the few dozen gaps of a
    chat is the longest of them, and all chats share their steps: one in some thousands is to be late.
    """
    return 1.0 + at.cost.uncertainty[kind].beyond


def has_time_to_project(tokens: int, decodes: Sequence[Running], at: Moment) -> bool:
    """Whether a step of these has time to make K and V of so many tokens more."""
    return estimate_of(decodes, at).with_hidden(tokens) <= step_bounds(
        decodes, (), Waiting(at.policy), at
    ).all_s / caution(at)


def _prompts_bound_s(decodes: Iterable[Running], prompts: Iterable[Running], waiting: Waiting, at: Moment) -> float:
    """R, as far as prompts are concerned."""
    bound, now, most_s = inf, at.now, at.times.most_s
    beside = estimate_of((one for one in decodes if one.promise.is_rt), at)
    for running in prompts:
        if (dues := running.promise.dues) is not None:
            chunks = -(-running.num_ahead // at.chunk)
            with_it_s = beside.with_chunk(min(running.num_ahead, at.chunk), running.prefix, running.num_hidden)
            room_s = step_room_s(dues, now, chunks, most_s, with_it_s)
            if room_s == inf and chunks > 1:  # in steps as they are; in one with all of it?
                whole_s = beside.with_chunk(running.num_ahead, running.prefix, running.num_hidden)
                room_s = step_room_s(dues, now, 1, most_s, whole_s)
            bound = min(bound, room_s)
    if waiting:
        bound = min(bound, waiting.bound_s(now, lambda tokens: beside.with_chunk(tokens, 0)))
    return bound


def prompt_budget(decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment) -> int:
    """Prompt tokens of a step, whatever time there is."""
    policy = at.policy
    if policy.chunking is not Chunking.SLO:
        return at.room
    if not policy.as_in_paper:
        return max(at.block_size, int(policy.budget_pivots * at.pivot))
    tbts = (one.request.slo.tbt_s for one in decodes if one.promise.is_rt)
    ttfts = (one.request.slo.ttft_s for one in prompts if one.promise.is_rt)
    least_s = min(chain(tbts, ttfts, (waiting.least_ttft_s,)))
    pivot_s = at.cost.seconds(Shape.of([(at.pivot, 0)]))
    if least_s == inf or not pivot_s:
        return at.room
    return max(at.block_size, int(at.pivot * least_s / pivot_s) - len(decodes))  # AccelGen's formula 6
