"""The limits of a step: R, which the tightest real-time request leaves for it, and the budget of prompt tokens.

`StepRules` are ours; `PaperRules` are AccelGen's own, to compare with. `rules_of` is the only place that chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
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
    """The facts that a choice depends on beside the requests."""

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
    calm_s: float = inf  # most time of a step with documents, for real-time requests that are still to come
    joins_s: float = inf  # most time of a step with more than real-time decodes, for requests that are handed on to it


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
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


def estimate_of(decodes: Iterable[Running], at: Moment) -> StepEstimate:
    """Return what a step of these decodes is expected to take."""
    return StepEstimate(at.cost, shape_of((), list(decodes)))


def shape_of(chunks: Sequence[Chunk], decodes: Sequence[Running]) -> Shape:
    sizes = [(len(chunk.tokens), chunk.start - chunk.dropped) for chunk in chunks]
    hidden = sum([running.prefix for running in decodes if running.blocks])
    hidden += sum([chunk.start for chunk in chunks if chunk.blocks])
    return Shape.build(sizes, [running.prefix - running.dropped for running in decodes], hidden)


def all_of(decodes: Sequence[Running], chunks: tuple[Chunk, ...], at: Moment) -> Selection:
    """Return the selection of all that is given."""
    shape = shape_of(chunks, decodes)
    return Selection(decodes, chunks, shape, at.cost.seconds(shape))


@dataclass(frozen=True, slots=True)
class StepBounds:
    """R: the most time that the coming step may take."""

    decodes_s: float = inf  # for real-time decodes, so that none of them is late
    all_s: float = inf  # for real-time prompts too, those that are here and those that are still to come


_UNBOUNDED = StepBounds()


class StepRules:
    """Our own rules, where they differ from AccelGen's paper."""

    delays_decodes = True  # a prompt may make decodes late where its first token is worth that

    def times(self, recent: StepTimes) -> StepTimes:
        """Return the step times that work is reckoned with."""
        return recent

    def bounds_steps(self, policy: Policy) -> bool:
        """Return whether promises bound the time of a step."""
        return policy.chunking is Chunking.SLO

    def budget(self, decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment) -> int:
        """Return how many prompt tokens a step may run with slo chunking, whatever time there is."""
        return max(at.block_size, int(at.policy.budget_pivots * at.pivot))

    def scales(self, tokens: int, room: int, memory: int) -> tuple[int, int]:
        """Return what distances of demands along tokens and memory are divided by."""
        return max(tokens, room), memory

    def run_stages(self, stages: Sequence[Callable[[bool], None]], hold_back: Callable[[], None]) -> None:
        """Run the stages of a choice for both classes; each is told whether it is for real-time requests.

        All stages are for real-time requests first: what urgent best-effort requests took of R before them, a prompt
        had to make up for in its last moment, and it was late whenever a step took longer than predicted.
        """
        for stage in stages:
            stage(True)
        hold_back()
        for stage in stages:
            stage(False)

    def unfinished(self, prompts: Iterable[Running], residents: Iterable[Running]) -> list[Running]:
        """Return the requests that hold up long prompts as long as they have room: prompts, until they are through."""
        return [*prompts]


class PaperRules(StepRules):
    """AccelGen's own budget, slack and distance."""

    delays_decodes = False

    def times(self, recent: StepTimes) -> StepTimes:
        return StepTimes(recent.most_s, recent.most_s)  # T_max throughout

    def bounds_steps(self, policy: Policy) -> bool:
        return False

    def budget(self, decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment) -> int:
        tbts = (running.request.slo.tbt_s for running in decodes if running.promise.is_rt)
        ttfts = (running.request.slo.ttft_s for running in prompts if running.promise.is_rt)
        least_s = min(chain(tbts, ttfts, (waiting.least_ttft_s,)))
        pivot_s = at.cost.seconds(Shape.build([(at.pivot, 0)]))
        if least_s == inf or not pivot_s:
            return at.room
        return max(at.block_size, int(at.pivot * least_s / pivot_s) - len(decodes))  # AccelGen's formula 6

    def scales(self, tokens: int, room: int, memory: int) -> tuple[int, int]:
        return 1, 1

    def run_stages(self, stages: Sequence[Callable[[bool], None]], hold_back: Callable[[], None]) -> None:
        """Run each stage for both classes in turn."""
        for stage, is_rt in product(stages, (True, False)):
            stage(is_rt)

    def unfinished(self, prompts: Iterable[Running], residents: Iterable[Running]) -> list[Running]:
        """Return prompts and decodes: a long request holds up others until it ends."""
        return [*prompts, *residents]


_RULES = {False: StepRules(), True: PaperRules()}


def rules_of(policy: Policy) -> StepRules:
    """Return AccelGen's rules where the policy asks for them, or ours."""
    return _RULES[policy.as_in_paper]


def prompt_budget(decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment) -> int:
    """Return how many prompt tokens a step may run, whatever time there is."""
    if at.policy.chunking is not Chunking.SLO:
        return at.room
    return rules_of(at.policy).budget(decodes, prompts, waiting, at)


def step_bounds(
    decodes: Sequence[Running], prompts: Iterable[Running], waiting: Waiting, at: Moment, kept: Seated | None = None
) -> StepBounds:
    """Return R. Nothing is sorted or made here: this runs at every step over all that is on the worker.

    `kept` has these decodes in their order, of which the first are enough.

    A prompt that cannot make it beside the real-time decodes does not bind: they would be late for it, or it in vain.
    """
    if not rules_of(at.policy).bounds_steps(at.policy):
        return _UNBOUNDED
    if at.policy.late is Late.DROP_LAST:  # late requests run behind the others, and take none of their time
        decodes, kept = [running for running in decodes if not running.promise.is_late(at.now)], None
    bound, late_s = _decodes_bound_s(decodes, at) if kept is None else _kept_bound_s(kept, at)
    if kept is not None and (late_s < bound or prompts or waiting):
        decodes = kept.real_time(at.batch)  # more of them run in no step
    # A step that takes longer than predicted makes all decodes late at once; their next tokens can be in time again.
    if late_s < bound and estimate_of((decode for decode in decodes if decode.promise.is_rt), at).seconds <= late_s:
        bound = late_s
    prompts_s = _prompts_bound_s(decodes, prompts, waiting, at) if prompts or waiting else inf
    return StepBounds(bound, min(bound, prompts_s, at.calm_s))


def _decodes_bound_s(decodes: Iterable[Running], at: Moment) -> tuple[float, float]:
    """Return the bound of decodes that are in time, and the least time between two tokens that was promised to a decode
    that is not."""
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
    """Return the same for decodes that are kept in order, looking at the first few at a time.

    All decodes that ran in the same step are due at the same moment: those that are due no sooner than the bound cannot
    lower it.
    """
    bound, in_time = inf, kept.in_time(at.times.mean_s)
    while few := list(islice(in_time, _AT_A_TIME)):
        bound = min(bound, _decodes_bound_s([running for _, running in few], at)[0])
        if few[-1][0] - at.now + _ROUNDING_S > bound:
            break
    return bound, kept.least_missed_s


def caution(at: Moment, kind: Kind = Kind.MIXED) -> float:
    """Return by which factor a step's predicted time is to be less than the time that it may take.

    A step whose predicted time fills R would be late every other time. The 99th percentile of the few dozen gaps of a
    chat is the longest of them, and all chats share their steps: one step in some thousands is to be late.
    """
    return 1.0 + at.cost.uncertainty[kind].beyond


def _prompts_bound_s(decodes: Iterable[Running], prompts: Iterable[Running], waiting: Waiting, at: Moment) -> float:
    """Return R, as far as prompts are concerned."""
    bound, now, most_s = inf, at.now, at.times.most_s
    beside = estimate_of((running for running in decodes if running.promise.is_rt), at)
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
