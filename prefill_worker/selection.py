"""Which decodes and prompt chunks run in a step: those whose promises are most urgent, as far as time and room go.

A worker that only runs prompts and one that decodes beside them choose in the same way (AccelGen §4.2, BROS §4.2):

    R       the time that the step may take: what the tightest real-time request leaves for it
    order   urgent RT, urgent BE, other RT, other BE (slo.in_order)
    fill    one after the other, while the predicted step stays within R; only prompts are cut

Nobody real-time is made late by somebody best-effort: whatever the order says, a step stays within R. Two exceptions
keep work going: the first of the order runs alone where nothing fits, and the first real-time prompt gets a block of
tokens in each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from alignedserve.core import Chunk
from alignedserve.cost import CostModel, Estimate, Shape
from alignedserve.policy import Order, Policy, Steps
from alignedserve.prefill_worker.chunks import chunk_of, cut, whole
from alignedserve.running import Running
from alignedserve.slo import Late, StepTimes, in_order, step_room_s


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


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class Selection:
    decodes: Sequence[Running]
    chunks: tuple[Chunk, ...]
    shape: Shape
    predicted_s: float


def select(decodes: Sequence[Running], prompts: Sequence[Running], waiting: Iterable[Running], at: Moment) -> Selection:
    """Of those that are seated. Those that wait for room do not run, but the step has to end in time for them."""
    if at.policy.steps is Steps.PROMPTS_FIRST and prompts:
        return _all((), whole(prompts, at.room), at)
    if at.policy.order is Order.FCFS:
        return _all(decodes[: at.room], cut(prompts, at.room - len(decodes)), at)
    bound_s = _bound_s(decodes, (*prompts, *waiting), at)
    if not prompts and len(decodes) <= at.room:
        everybody = _all(decodes, (), at)
        if everybody.predicted_s <= bound_s:
            return everybody
    order = ranked((*decodes, *prompts), at)
    filling = _Filling(bound_s, at)
    for running in order:
        filling.add(running)
    if filling.is_empty and order:
        filling = _Filling(inf, at)
        filling.add(order[0])
    return filling.selection


def _all(decodes: Sequence[Running], chunks: tuple[Chunk, ...], at: Moment) -> Selection:
    sizes = [(len(chunk.tokens), chunk.start) for chunk in chunks]
    shape = Shape.of(sizes, [running.prefix for running in decodes])
    return Selection(decodes, chunks, shape, at.cost.seconds(shape))


def _bound_s(decodes: Iterable[Running], prompts: Iterable[Running], at: Moment) -> float:
    """R. Nothing is sorted or made here: this runs at every step over all that is on the worker."""
    bound, now, mean_s, most_s = inf, at.now, at.times.mean_s, at.times.most_s
    least_s, prefix_s = at.cost.one_decode
    for running in decodes:
        if (dues := running.promise.dues) is not None:
            room_s = step_room_s(dues, now, dues.num_left, mean_s, least_s + prefix_s * running.prefix)
            if room_s < bound:
                bound = room_s
    for running in prompts:
        if (dues := running.promise.dues) is not None:
            chunks = -(-running.num_ahead // at.chunk)
            alone_s = at.cost.seconds(Shape.of([(min(running.num_ahead, at.block_size), running.prefix)]))
            bound = min(bound, step_room_s(dues, now, chunks, most_s, alone_s))
    return bound


def ranked(these: Iterable[Running], at: Moment) -> list[Running]:
    """In the order in which they are to be served."""
    standings = {running.promise.standing(at.now, running.work(at.chunk), at.times): running for running in these}
    return [standings[one] for one in in_order(standings, at.times, at.policy.late)]


class _Filling:
    """A step that is being put together."""

    def __init__(self, bound_s: float, at: Moment) -> None:
        self._bound_s, self._at = bound_s, at
        self._estimate = Estimate(at.cost)
        self._room = at.room
        self._has_rt_prompt = False
        self.decodes: list[Running] = []
        self.chunks: list[Chunk] = []

    @property
    def selection(self) -> Selection:
        estimate = self._estimate
        return Selection(self.decodes, tuple(self.chunks), estimate.shape, estimate.seconds)

    def add(self, running: Running) -> None:
        """If it fits; of a prompt, as much as fits."""
        if self._room <= 0:
            return
        if running.decodes:
            self._add_decode(running)
        else:
            self._add_chunk(running)

    def _add_decode(self, running: Running) -> None:
        if self._estimate.with_decode(running.prefix) <= self._bound_s:
            self.decodes.append(running)
            self._estimate.add_decode(running.prefix)
            self._room -= 1

    def _add_chunk(self, running: Running) -> None:
        most = min(running.most_in_chunk, self._room)
        size = self._fitting(running.prefix, most)
        if size < self._at.block_size and self._may_exceed(running):
            size = min(most, self._at.block_size)
        if size:
            self.chunks.append(chunk_of(running, size))
            self._estimate.add_chunk(size, running.prefix)
            self._room -= size
            self._has_rt_prompt |= running.promise.is_rt

    def _may_exceed(self, running: Running) -> bool:
        """The first real-time prompt, unless it is to be behind all others."""
        if self._has_rt_prompt or not running.promise.is_rt:
            return False
        return self._at.policy.late is not Late.DROP_LAST or not running.promise.is_late(self._at.now)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks

    def _fitting(self, cached: int, most: int) -> int:
        """The most tokens with which the step stays in bounds: a longer chunk never takes less."""
        if self._estimate.with_chunk(most, cached) <= self._bound_s:
            return most
        fits = 0
        while most - fits > 1:
            middle = (fits + most) // 2
            if self._estimate.with_chunk(middle, cached) <= self._bound_s:
                fits = middle
            else:
                most = middle
        return fits
