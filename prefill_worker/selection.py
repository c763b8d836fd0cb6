"""Which decodes and prompt chunks run in a step: those whose promises are most urgent, as far as time and room go.

A worker that only runs prompts and one that decodes beside them choose alike (AccelGen §4.2, §4.4, BROS §4.2):

    R        the time that the step may take: what the tightest real-time request leaves for it. Real-time decodes
             may fill it; whatever else runs, only as far as it is in time if the step takes longer than predicted
    budget   prompt tokens: as many as stay within R, at most four times what saturates the hardware
    order    urgent RT, other RT, urgent BE, other BE; of each decodes before prompts
    choice   who is urgent in that order; then of those about as urgent, who fills time and memory best (windows.py)

Whoever waits is chosen with those that are seated, and gets its seat when it is chosen. Only the last prompt of a step
is cut. Nobody takes memory ahead of somebody who waits for more of it, unless both are about as urgent: else the large
would wait for ever.

Nobody real-time is made late by somebody best-effort: whatever the order says, a step stays within R. Two exceptions
keep work going: the first of the order runs alone where nothing fits, and the first real-time prompt gets a block of
tokens in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from itertools import chain, islice, product
from math import inf
from typing import Any

from alignedserve.core import Chunk
from alignedserve.cost import CostModel, Estimate, Kind, Shape
from alignedserve.policy import Choice, Chunking, Order, Policy
from alignedserve.prefill_worker.chunks import chunk_of, cut, whole
from alignedserve.prefill_worker.seated import Seated
from alignedserve.prefill_worker.seating import Seating
from alignedserve.prefill_worker.waiting import Ranked, Waiting
from alignedserve.prefill_worker.windows import Left, Window, windows
from alignedserve.running import Running
from alignedserve.slo import Late, Rank, StepTimes, step_room_s

# A step whose predicted time fills R would be late every other time. The 99th percentile of the few dozen gaps of a
# chat is the longest of them, and all chats share their steps: hardly one in a thousand is to be late.
_P999_OF_P90 = 2.41  # of errors that are normally distributed


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


def select(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, seating: Seating
) -> Selection:
    policy = at.policy
    if at.seated is not None and len(decodes) <= at.batch:
        at.seated.forget()
    if policy.is_plain:  # who waits has been given what room there was
        if policy.chunking is Chunking.NONE and prompts:
            return _all((), whole(prompts, at.room), at)
        return _all(decodes[: at.room], cut(prompts, at.room - len(decodes)), at)
    waiting.refresh(at.now, at.times, at.chunk)
    if policy.chunking is Chunking.NONE:
        found = _filled((), prompts, waiting, at, seating) if prompts or waiting else None
        if found is not None and not found.is_empty:
            return found
        if len(decodes) > at.batch:
            return _filled(decodes, (), Waiting(policy), at, seating)
        return _all(decodes[: at.room], (), at)
    if not prompts and not waiting and len(decodes) <= min(at.room, at.batch):
        everybody = _all(decodes, (), at)
        if everybody.predicted_s <= _bound_s(decodes, (), waiting, at) / _caution(at):
            return everybody
    return _filled(decodes, prompts, waiting, at, seating)


def _estimate(decodes: Iterable[Running], at: Moment) -> Estimate:
    return Estimate(at.cost, _shape((), list(decodes)))


def _shape(chunks: Sequence[Chunk], decodes: Sequence[Running]) -> Shape:
    sizes = [(len(chunk.tokens), chunk.start) for chunk in chunks]
    hidden = sum([one.prefix for one in decodes if one.blocks]) + sum([one.start for one in chunks if one.blocks])
    return Shape.of(sizes, [one.prefix for one in decodes], hidden)


def _all(decodes: Sequence[Running], chunks: tuple[Chunk, ...], at: Moment) -> Selection:
    shape = _shape(chunks, decodes)
    return Selection(decodes, chunks, shape, at.cost.seconds(shape))


def _bound_s(decodes: Iterable[Running], prompts: Iterable[Running], waiting: Waiting, at: Moment) -> float:
    """R. Nothing is sorted or made here: this runs at every step over all that is on the worker.

    A prompt that cannot make it beside the real-time decodes does not bind: they would be late for it, or it in vain.
    """
    if at.policy.chunking is not Chunking.SLO or at.policy.as_in_paper:
        return inf
    bound, now, mean_s = inf, at.now, at.times.mean_s
    (least_s, prefix_s), hidden_s = at.cost.one_decode, at.cost.hidden_token_s
    late_s = inf
    for running in decodes:
        if (dues := running.promise.dues) is not None:
            alone_s = least_s + (prefix_s + hidden_s if running.blocks else prefix_s) * running.prefix
            room_s = step_room_s(dues, now, dues.num_left, mean_s, alone_s)
            if room_s < bound:
                bound = room_s
            if dues.num_missed:
                late_s = min(late_s, running.request.slo.tbt_s)
    # One step that takes longer than was predicted makes all late at once. Their next tokens can be in time again.
    if late_s < bound and _estimate((one for one in decodes if one.promise.is_rt), at).seconds <= late_s:
        bound = late_s
    if prompts or waiting:
        bound = min(bound, _prompts_bound_s(decodes, prompts, waiting, at))
    return min(bound, at.calm_s)


def _caution(at: Moment) -> float:
    """What a step may be predicted to take is by this factor less than what it may take."""
    return 1.0 + _P999_OF_P90 * at.cost.uncertainty[Kind.MIXED].p90


def has_time_to_project(tokens: int, decodes: Sequence[Running], at: Moment) -> bool:
    """Whether a step of these has time to make K and V of so many tokens more."""
    return _estimate(decodes, at).with_hidden(tokens) <= _bound_s(decodes, (), Waiting(at.policy), at) / _caution(at)


def _prompts_bound_s(decodes: Iterable[Running], prompts: Iterable[Running], waiting: Waiting, at: Moment) -> float:
    """R, as far as prompts are concerned."""
    bound, now, most_s = inf, at.now, at.times.most_s
    beside = _estimate((one for one in decodes if one.promise.is_rt), at)
    for running in prompts:
        if (dues := running.promise.dues) is not None:
            chunks = -(-running.num_ahead // at.chunk)
            with_it_s = beside.with_chunk(min(running.num_ahead, at.chunk), running.prefix, running.num_hidden)
            bound = min(bound, step_room_s(dues, now, chunks, most_s, with_it_s))
    if waiting:
        bound = min(bound, waiting.bound_s(now, lambda tokens: beside.with_chunk(tokens, 0)))
    return bound


def _budget(decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment) -> int:
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


@dataclass(slots=True)
class _Ranks:
    """Those that are seated, by what becomes of them; each list in its order."""

    urgent_rt: list[Ranked] = field(default_factory=list)
    urgent_be: list[Ranked] = field(default_factory=list)
    rt: list[Ranked] = field(default_factory=list)
    be: list[Ranked] = field(default_factory=list)
    late: list[Ranked] = field(default_factory=list)

    @classmethod
    def of(cls, these: Iterable[Running], at: Moment) -> _Ranks:
        found, late, by_windows = cls(), at.policy.late, at.policy.selection is Choice.MULTI_RESOURCE
        lists = {
            Rank.URGENT_RT: found.urgent_rt,
            Rank.URGENT_BE: found.urgent_be,
            Rank.RT: found.rt,
            Rank.BE: found.be,
            Rank.LATE: found.late,
        }
        for running in these:
            standing = running.promise.standing(at.now, running.work(at.chunk), at.times)
            key: tuple[Any, ...] = standing.key(at.times, late)
            if by_windows and key[0] is Rank.BE and (standing.is_prompt or at.policy.as_in_paper):
                key = (*key[:3], standing.slack_s, standing.remaining)
            lists[key[0]].append(((*key, standing.arrival_at, standing.id), running))
        for ranks in lists.values():
            ranks.sort(key=_by_key)
        return found

    def __iter__(self) -> Iterator[Ranked]:
        return chain(self.urgent_rt, self.urgent_be, self.rt, self.be, self.late)

    def urgent(self, is_rt: bool) -> Iterable[Ranked]:
        return self.urgent_rt if is_rt else self.urgent_be

    def decodes(self, is_rt: bool) -> Iterable[Ranked]:
        """Of those that are not urgent."""
        return [one for one in (self.rt if is_rt else self.be) if one[1].decodes]

    def prompts(self, is_rt: bool) -> Iterable[Ranked]:
        """Of those that are not urgent."""
        return [one for one in (self.rt if is_rt else self.be) if not one[1].decodes]

    def dropped(self) -> Iterable[Ranked]:
        return self.late


class _KeptRanks:
    """The same of decodes whose order is kept between steps, and of prompts; nobody is ranked who is not asked for."""

    def __init__(self, kept: Seated, prompts: Iterable[Running], at: Moment) -> None:
        self._kept, self._prompts, self._at = kept, _Ranks.of(prompts, at), at

    def __iter__(self) -> Iterator[Ranked]:
        for is_rt in (True, False):
            yield from self.urgent(is_rt)
        for is_rt in (True, False):
            yield from merge(self.decodes(is_rt), self.prompts(is_rt), key=_by_key)
        yield from self.dropped()

    def urgent(self, is_rt: bool) -> Iterable[Ranked]:
        decodes = self._kept.urgent(self._at.now, self._at.times.most_s, is_rt)
        return merge(decodes, self._prompts.urgent(is_rt), key=_by_key)

    def decodes(self, is_rt: bool) -> Iterable[Ranked]:
        return self._kept.later(self._at.now, self._at.times.most_s, is_rt)

    def prompts(self, is_rt: bool) -> Iterable[Ranked]:
        return self._prompts.prompts(is_rt)

    def dropped(self) -> Iterable[Ranked]:
        return merge(self._kept.late(self._at.now), self._prompts.dropped(), key=_by_key)


def _by_key(one: Ranked) -> Any:
    return one[0]


def _filled(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, seating: Seating
) -> Selection:
    order, by_windows = at.policy.order, at.policy.selection is Choice.MULTI_RESOURCE
    kept = at.seated if at.policy.packs and len(decodes) > at.batch else None
    if kept is not None:
        kept.refresh(decodes, at.now, at.times)
    bound_s = _bound_s(decodes if kept is None else kept.real_time, prompts, waiting, at)
    filling = _Filling(bound_s, _budget(decodes, prompts, waiting, at), at, seating)
    first: Sequence[Running] = ()
    if kept is None:
        first = decodes if order is not Order.SLACK else _before_prompts(decodes, prompts, waiting, at)
    if kept is None and filling.add_decodes(first):
        taken = set(map(id, first)) if len(first) < len(decodes) else None
        left = () if taken is None else [one for one in decodes if id(one) not in taken]
        seated = (*left, *prompts)
    else:
        seated = (*decodes, *prompts)
    # Thousands of best-effort prompts may wait for pages: where there are none, they are not looked at.
    in_order = partial(waiting.in_order, only_rt=not seating.takes_best_effort)
    ranks: Iterable[Ranked]
    if order is Order.SLACK and by_windows:
        ranks = by_rank = _Ranks.of(seated, at) if kept is None else _KeptRanks(kept, prompts, at)
        _fill_by_windows(filling, by_rank, waiting)
    elif by_windows:
        ranks = _by_arrival(seated)
        filling.add_all(one for one in ranks if one[1].decodes)
        rest = chain(((0, one) for one in prompts if not one.decodes), filling.from_waiting(in_order))
        filling.add_windows(((0, running.request.arrival_at), running) for _, running in rest)
    else:
        ranks = _ranks(seated, at) if kept is None else _KeptRanks(kept, prompts, at)
        waits = [filling.from_waiting(in_order)]
        if at.policy.packs:  # best-effort ones that find no memory hold up nobody real-time
            be = filling.from_waiting(partial(waiting.in_order, only_be=True), only_be=True)
            waits = [filling.from_waiting(partial(waiting.in_order, only_rt=True)), be]
        filling.add_all(merge(ranks, *waits, key=_by_key))
    if filling.is_empty:
        filling.add_one_alone(merge(ranks, in_order(at.now, at.times.most_s), key=_by_key), ranks)
    if kept is not None:
        kept.ran(filling.decodes)
    return filling.selection


def _before_prompts(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment
) -> Sequence[Running]:
    """Decodes that run whatever prompts there are, where there is time for all of them.

    Real-time ones: who is left out would be late more often than a prompt that gets a little less. Best-effort ones
    only beside prompts that are not urgent, and where a step has a place for real-time prompts beside them.
    """
    now, most_s, late = at.now, at.times.most_s, at.policy.late
    if late is Late.DROP_LAST:
        return [one for one in decodes if one.promise.is_rt and not one.promise.is_late(now)]
    is_urgent = any(next(waiting.urgent(now, most_s, is_rt), None) for is_rt in (True, False)) or any(
        one.promise.standing(now, one.work(at.chunk), at.times).slack_s <= most_s for one in prompts
    )
    is_full = len(decodes) >= at.batch and any(
        one.promise.is_rt for one in chain(islice(waiting.real_time, 1), prompts)
    )
    return [one for one in decodes if one.promise.is_rt] if is_urgent or is_full else decodes


def _ranks(these: Sequence[Running], at: Moment) -> Iterable[Ranked]:
    """Of those that are seated, as they are to be served."""
    match at.policy.order:
        case Order.SLACK:
            return _Ranks.of(these, at)
        case Order.FCFS:
            return _by_arrival(these)
    standings = ((one.promise.standing(at.now, one.work(at.chunk), at.times), one) for one in these)
    return sorted((((one.remaining, one.arrival_at, one.id), running) for one, running in standings), key=_by_key)


def in_order(seated: Iterable[Running], at: Moment) -> list[Running]:
    """Those that are seated, as they are to be served."""
    return [running for _, running in _ranks(tuple(seated), at)]


def last(prompts: Iterable[Running], at: Moment) -> Running:
    """Of those that are seated."""
    return in_order(prompts, at)[-1]


def _by_arrival(seated: Iterable[Running]) -> list[Ranked]:
    """Before all that wait."""
    return [((-1,), running) for running in seated]


def _fill_by_windows(filling: _Filling, ranks: _Ranks | _KeptRanks, waiting: Waiting) -> None:
    """Urgent ones in order; then decodes before prompts, for which what they leave is the budget.

    All of it for real-time requests first: what urgent best-effort ones took of R before them, a prompt had to make up
    for in its last moment, and it was late whenever a step took longer than predicted. AccelGen has both in turn.
    """

    def urgent(is_rt: bool) -> None:
        waits = filling.from_waiting(partial(waiting.urgent, is_rt=is_rt), not is_rt)
        filling.add_all(merge(ranks.urgent(is_rt), waits, key=_by_key), is_rt)

    def decodes(is_rt: bool) -> None:
        filling.add_all(ranks.decodes(is_rt), is_rt)

    def prompts(is_rt: bool) -> None:
        rest = filling.from_waiting(partial(waiting.later, is_rt=is_rt), not is_rt)
        ranked = merge(ranks.prompts(is_rt), rest, key=_by_key)
        ahead = 1 if is_rt else 2  # of a key come before the priority and the slack
        filling.add_windows((key[ahead : ahead + 2], running) for key, running in ranked)

    stages = (urgent, decodes, prompts)
    if filling.policy.as_in_paper:
        for stage, is_rt in product(stages, (True, False)):
            stage(is_rt)
    else:
        for stage in stages:
            stage(True)
        filling.hold_back()
        for stage in stages:
            stage(False)
    filling.add_all(merge(ranks.dropped(), filling.from_waiting(lambda now, _: waiting.late(now)), key=_by_key))


class _Filling:
    """A step that is being put together."""

    def __init__(self, bound_s: float, budget: int, at: Moment, seating: Seating) -> None:
        self._most_s = bound_s  # for real-time decodes
        self._bound_s = bound_s / _caution(at)  # for all others
        self._budget, self._at, self._seating = budget, at, seating
        if at.policy.is_hybrid:
            seating.has_time_to_project = self._has_time_to_project
        self.policy = at.policy
        self._estimate = Estimate(at.cost)
        self._room, self._places = at.room, at.batch
        self._stopped_on_time = self._is_full = self._has_replaced = False
        self._spare: list[tuple[float, Running]] | None = None  # real-time decodes, the most slack last
        self._has_sure = False  # the prompt that gets a block in any case
        self._has_cut = False  # a prompt, for want of time or tokens: there is none for others
        self._has_no_memory = False  # somebody waits for it: nobody else is seated
        self._be_has_no_memory = False  # somebody best-effort does: real-time ones do not stand behind it
        self._has_long: bool | None = None  # whether a long prompt is unfinished
        self.decodes: list[Running] = []
        self.chunks: list[Chunk] = []

    @property
    def selection(self) -> Selection:
        seating = self._seating
        if seating.unseated:
            self._leave_out(seating.unseated)
        if seating.unseated or self._has_replaced:
            self._recount()
        estimate, late = self._estimate, self._stopped_on_time or self._has_cut
        chunks, seated, unseated = tuple(self.chunks), seating.seated, seating.unseated
        return Selection(self.decodes, chunks, estimate.shape, estimate.seconds, seated, unseated, late)

    def _leave_out(self, unseated: Sequence[Running]) -> None:
        """Those that were chosen before somebody else took their memory."""
        names = {one.request.id for one in unseated}
        self.decodes = [one for one in self.decodes if one.request.id not in names]
        self.chunks = [one for one in self.chunks if one.request not in names]

    def _recount(self) -> None:
        self._estimate = Estimate(self._at.cost, _shape(self.chunks, self.decodes))

    def _has_time_to_project(self, tokens: int) -> bool:
        return self._estimate.with_hidden(tokens) <= self._bound_s

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks and not self._seating.seated

    def from_waiting(
        self, source: Callable[[float, float], Iterator[Ranked]], only_be: bool = False
    ) -> Iterator[Ranked]:
        """As long as they may be seated."""
        seating = self._seating
        if only_be and not seating.takes_best_effort:
            return
        for one in source(self._at.now, self._at.times.most_s):
            if self._has_no_memory or not self._takes_prompts:
                return
            if only_be and (self._be_has_no_memory or not seating.takes_best_effort):
                return
            if self._takes(one[1]) and self._seating.may_seat(one[1]):
                yield one

    @property
    def _takes_prompts(self) -> bool:
        return self._room > 0 and self._places > 0 and self._budget > 0 and not (self._has_cut and self._has_sure)

    def _takes(self, prompt: Running) -> bool:
        return not self._has_cut or self._may_exceed(prompt)

    # --- In order

    def add_decodes(self, decodes: Sequence[Running]) -> bool:
        """All of them, or none where they do not fit."""
        estimate = _estimate(decodes, self._at)
        bound_s = self._most_s if all(one.promise.is_rt for one in decodes) else self._bound_s
        if estimate.seconds > bound_s or len(decodes) > min(self._room, self._places):
            return False
        self._estimate = estimate
        self.decodes += decodes
        self._room -= len(decodes)
        self._places -= len(decodes)
        return True

    def add_all(self, ranked: Iterable[Ranked], is_rt: bool | None = None) -> None:
        """All of one class, or of both."""
        for key, running in ranked:
            if self._room <= 0 or (self._is_full and is_rt is False):
                return
            if self._places <= 0 and (self._is_full or running.promise.is_rt):
                if is_rt:
                    return
                continue
            self._add(running, key[0] is Rank.URGENT_RT or key[0] is Rank.URGENT_BE)

    def hold_back(self) -> None:
        """Best-effort prompts come next: beside real-time decodes, no more than saturates the hardware.

        More of them gain next to nothing, and what a step that is longer than predicted costs grows with it.
        """
        if self.policy.chunking is Chunking.SLO and any(one.promise.is_rt for one in self.decodes):
            left = max(self._at.block_size, self._at.pivot) - self._estimate.chunk_tokens
            self._budget = max(0, min(self._budget, left))

    def add_one_alone(self, ranked: Iterable[Ranked], seated: Iterable[Ranked]) -> None:
        """The first that may run, whatever time it takes. Where it waits for memory, a decode that gives some back."""
        self._most_s = self._bound_s = inf
        self._has_cut = False
        self._has_no_memory = self._be_has_no_memory = False
        self._budget = max(self._budget, self._at.block_size)
        for _, running in ranked:
            self._add(running, is_urgent=True)
            if not self.is_empty:
                return
            if self._lacks_memory(running) and not running.pairs:
                break
        for _, running in seated:
            if running.decodes:
                self._add(running, is_urgent=True)
            if not self.is_empty:
                return

    def _add(self, running: Running, is_urgent: bool) -> None:
        """If it fits; of a prompt, as much as fits."""
        if running.decodes:
            bound_s = self._most_s if running.promise.is_rt else self._bound_s
            is_late = self._estimate.with_decode(running.prefix, running.num_hidden) > bound_s
            self._stopped_on_time |= is_late
            if (is_late or not self._places) and not self._replaces(running):
                return
            if self._seating.demand(running, 1):  # a prompt computed anew may lack a place; decodes have one
                if not self._seating.most(running, 1):
                    self._found_no_memory(running)
                    return
                self._seating.take(running, 1)
            self.decodes.append(running)
            self._estimate.add_decode(running.prefix)
            self._estimate.add_hidden(running.num_hidden)
            self._room -= 1
            self._places -= 1
            return
        most = min(running.most_in_chunk, self._room, self._budget) if self._places else 0
        if most <= 0 or not self._takes(running) or self._must_wait(running, is_urgent):
            return
        if most < running.most_in_chunk and not self._may_cut:
            self._budget = 0  # nobody overtakes it
            return
        with_memory = self._seating.most(running, most)
        if with_memory:
            self._add_chunk(running, with_memory)
        if with_memory < most:
            self._found_no_memory(running)

    def _found_no_memory(self, running: Running) -> None:
        if self.policy.packs and not running.promise.is_rt:
            self._be_has_no_memory = True
        else:
            self._has_no_memory = True

    def _lacks_memory(self, running: Running) -> bool:
        """Whether another one waits for it that is to be seated before this one."""
        return self._has_no_memory or (self._be_has_no_memory and not running.promise.is_rt)

    def _replaces(self, best_effort: Running) -> bool:
        """It takes the place of the real-time decode with most slack, if that one is in time without this step too.

        The first best-effort decode that neither fits nor may replace ends the choice of such (BROS §4.2, Alg. 1).
        """
        if self._is_full or best_effort.promise.is_rt or not self.policy.packs:
            return False
        if self._spare is None:
            slacks = ((self._slack_s(one), one) for one in self.decodes if one.promise.is_rt)
            self._spare = sorted(((slack_s, one) for slack_s, one in slacks if slack_s != inf), key=lambda one: one[0])
        if self._spare:
            slack_s, real_time = self._spare[-1]
            estimate = self._estimate  # the longest may be the one that goes: that is counted again in the end
            estimate.decodes -= 1
            estimate.prefixes -= real_time.prefix
            estimate.hidden -= real_time.num_hidden
            if estimate.with_decode(best_effort.prefix, best_effort.num_hidden) <= min(self._bound_s, slack_s):
                self._spare.pop()
                self.decodes.remove(real_time)
                self._has_replaced = True
                self._room += 1
                self._places += 1
                return True
            estimate.add_decode(real_time.prefix)
            estimate.add_hidden(real_time.num_hidden)
        self._is_full = True
        return False

    def _slack_s(self, real_time: Running) -> float:
        """Unless it is late already: then it is to run as soon as it can."""
        now, dues = self._at.now, real_time.promise.dues
        if dues is None or dues.is_late(now):
            return inf
        return dues.due_at(now) - now - dues.num_left * self._at.times.mean_s

    @property
    def _may_cut(self) -> bool:
        """Where prompts are not chunked, one that is longer than any step is cut all the same."""
        return self.policy.chunking is not Chunking.NONE or not self.chunks

    def _must_wait(self, running: Running, is_urgent: bool = False) -> bool:
        """To be seated: for memory, pages, or for another long prompt to end (ERA, AccelGen §4.2)."""
        if running.pairs:
            return False
        if self._lacks_memory(running) or not self._seating.may_seat(running):
            return True
        is_long = self.policy.chunking is Chunking.SLO and running.num_tokens >= self.policy.long_prompt
        if not is_long or is_urgent:
            return False
        if self._has_long is None:
            self._has_long = self._seating.has_long()
        return self._has_long

    def _add_chunk(self, running: Running, most: int) -> int:
        """Of so many tokens, for which there is memory, as many as there is time for."""
        if running.known and not running.pairs:  # what is known of it is fetched first
            self._seating.take(running, most)
            return 0
        size = 0 if self._has_cut else self._fitting(running.prefix, most, running.num_hidden)
        if size < self._at.block_size and self._may_exceed(running):
            size = min(most, self._at.block_size)
        self._has_cut |= size < most
        if size:
            if not running.pairs and running.num_tokens >= self.policy.long_prompt:
                self._has_long = True
            self._seating.take(running, size)
            self.chunks.append(chunk_of(running, size))
            self._estimate.add_chunk(size, running.prefix)
            self._estimate.add_hidden(running.num_hidden)
            self._room -= size
            self._places -= 1
            self._budget -= size
            self._has_sure |= running.promise.is_rt or self.policy.order is not Order.SLACK
        return size

    # --- By windows

    def add_windows(self, prompts: Iterable[tuple[tuple[int, float], Running]]) -> None:
        for members in windows(prompts, self.policy.window_s):
            if not self._takes_prompts or not self._takes(members[0]):
                return
            tokens = self._left_tokens(members[0])
            self._has_cut |= tokens < 1
            if tokens:
                self._add_window(Window(members, self._seating), tokens, members[0])

    def _left_tokens(self, first: Running) -> int:
        """Of the budget."""
        fits = 0 if self._has_cut else self._fitting(0, min(self._room, self._budget))
        if fits < self._at.block_size and self._may_exceed(first):
            return min(self._room, self._budget, self._at.block_size)
        return fits

    def _add_window(self, window: Window, tokens: int, first: Running) -> None:
        seating, raw = self._seating, self.policy.as_in_paper
        token_scale = 1 if raw else max(tokens, self._at.room)
        memory_scale = 1 if raw else seating.total * seating.block_size
        while tokens > 0 and self._places > 0:
            left = Left(tokens, seating.left_for(first), token_scale, memory_scale)
            found = window.take_nearest(left, self._may_cut, self._most_of)
            if found is None:
                # Who fits in time but finds no memory, or no seat, is not overtaken by those of later windows.
                if any(not seating.most(one, 1) for one in window if seating.may_seat(one)):
                    self._found_no_memory(first)
                return
            running, size = found
            tokens -= self._add_chunk(running, size)
            if self._has_cut:
                return

    def _most_of(self, running: Running, size: int) -> int:
        return 0 if self._must_wait(running) else self._seating.most(running, size)

    def _may_exceed(self, running: Running) -> bool:
        """The first real-time prompt, unless it is to be behind all others; without promises, the first of all."""
        if self._has_sure or self.policy.order is not Order.SLACK:
            return not self._has_sure
        if not running.promise.is_rt:
            return False
        return self.policy.late is not Late.DROP_LAST or not running.promise.is_late(self._at.now)

    def _fitting(self, cached: int, most: int, hidden: int = 0) -> int:
        """The most tokens with which the step stays in bounds: a longer chunk never takes less."""
        if self._estimate.with_chunk(most, cached, hidden) <= self._bound_s:
            return most
        fits = 0
        while most - fits > 1:
            middle = (fits + most) // 2
            if self._estimate.with_chunk(middle, cached, hidden) <= self._bound_s:
                fits = middle
            else:
                most = middle
        return fits
