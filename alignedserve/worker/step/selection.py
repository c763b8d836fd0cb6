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

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from heapq import merge
from itertools import chain, islice, product

from alignedserve.cost.model import Kind
from alignedserve.scheduling.policy import Choice, Chunking, Order
from alignedserve.scheduling.slo import Late
from alignedserve.worker.step.chunks import cut, whole
from alignedserve.worker.step.filling import Filling
from alignedserve.worker.step.limits import Moment, Selection, all_of, caution, prompt_budget, step_bounds
from alignedserve.worker.step.ranks import KeptRanks, Ranks, by_arrival, by_key, ranked
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seated import Seated
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.waiting import Ranked, Waiting


def select(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, seating: Seating
) -> Selection:
    policy = at.policy
    if at.seated is not None and len(decodes) <= at.batch:
        at.seated.forget()
    if policy.is_plain:  # who waits has been given what room there was
        if policy.chunking is Chunking.NONE and prompts:
            return all_of((), whole(prompts, at.room), at)
        return all_of(decodes[: at.room], cut(prompts, at.room - len(decodes)), at)
    waiting.refresh(at.now, at.times, at.chunk)
    if policy.chunking is Chunking.NONE:
        found = _filled((), prompts, waiting, at, seating) if prompts or waiting else None
        if found is not None and not found.is_empty:
            return found
        if len(decodes) > at.batch:
            return _filled(decodes, (), Waiting(policy), at, seating)
        return all_of(decodes[: at.room], (), at)
    if not prompts and not waiting and len(decodes) <= min(at.room, at.batch):
        everybody = all_of(decodes, (), at)
        if everybody.predicted_s <= step_bounds(decodes, (), waiting, at).all_s / caution(at, Kind.DECODE):
            return everybody
    return _filled(decodes, prompts, waiting, at, seating)


def _filled(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, seating: Seating
) -> Selection:
    order, by_windows = at.policy.order, at.policy.selection is Choice.MULTI_RESOURCE
    kept = at.seated if len(decodes) > at.batch else None
    if kept is not None:
        kept.refresh(decodes, at.now, at.times)
    bounds = step_bounds(decodes, prompts, waiting, at, kept)
    filling = Filling(bounds, prompt_budget(decodes, prompts, waiting, at), at, seating)
    first: Sequence[Running] = decodes
    if kept is not None:
        first = _before_others(kept, prompts, waiting, at)
    elif order is Order.SLACK:
        first = _before_prompts(decodes, prompts, waiting, at)
    seated: Sequence[Running] = (*decodes, *prompts)
    if filling.add_decodes(first) and kept is None:
        taken = set(map(id, first)) if len(first) < len(decodes) else None
        left = () if taken is None else [one for one in decodes if id(one) not in taken]
        seated = (*left, *prompts)
    # Thousands of best-effort prompts may wait for pages: where there are none, they are not looked at.
    in_order = partial(waiting.in_order, only_rt=not seating.takes_best_effort)
    ranks: Iterable[Ranked]
    if order is Order.SLACK and by_windows:
        ranks = by_rank = Ranks.of(seated, at) if kept is None else KeptRanks(kept, prompts, at)
        _fill_by_windows(filling, by_rank, waiting)
    elif by_windows:
        ranks = by_arrival(seated)
        filling.add_all(one for one in ranks if one[1].decodes)
        rest = chain(((0, one) for one in prompts if not one.decodes), filling.from_waiting(in_order))
        filling.add_windows(((0, running.request.arrival_at), running) for _, running in rest)
    else:
        ranks = ranked(seated, at) if kept is None else KeptRanks(kept, prompts, at)
        lines = at.policy.precedence.lines
        waits = [filling.from_waiting(in_order) if is_rt is None else _line(filling, waiting, is_rt) for is_rt in lines]
        filling.add_all(merge(ranks, *waits, key=by_key))
    if filling.is_empty:
        filling.add_one_alone(merge(ranks, in_order(at.now, at.times.most_s), key=by_key), ranks)
    if kept is not None:
        kept.ran(filling.decodes)
    return filling.selection


def _line(filling: Filling, waiting: Waiting, is_rt: bool) -> Iterator[Ranked]:
    """Yield the waiting prompts of one class, as long as they may be seated."""
    return filling.from_waiting(partial(waiting.in_order, only_rt=is_rt, only_be=not is_rt), only_be=not is_rt)


def _before_prompts(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment
) -> Sequence[Running]:
    """Decodes that run whatever prompts there are, where there is time for all of them.

    Real-time ones: who is left out would be late more often than a prompt that gets a little less. Best-effort ones
    only beside best-effort prompts that are not urgent: a real-time one would creep beside them, and need more steps.
    """
    now, most_s, late = at.now, at.times.most_s, at.policy.late
    if late is Late.DROP_LAST:
        return [one for one in decodes if one.promise.is_rt and not one.promise.is_late(now)]
    is_urgent = any(next(waiting.urgent(now, most_s, is_rt), None) for is_rt in (True, False)) or any(
        one.promise.standing(now, one.work(at.chunk), at.times).slack_s <= most_s for one in prompts
    )
    has_rt = any(one.promise.is_rt for one in chain(islice(waiting.real_time, 1), prompts))
    return [one for one in decodes if one.promise.is_rt] if is_urgent or has_rt else decodes


def _before_others(kept: Seated, prompts: Sequence[Running], waiting: Waiting, at: Moment) -> Sequence[Running]:
    """The same where there are more decodes than places: real-time ones, all or none beside a real-time prompt. Without
    one they come first in any case, as many as have places: to look at each alone would take half of the choice."""
    if any(one.promise.is_rt for one in chain(islice(waiting.real_time, 1), prompts)):
        return kept.real_time()
    if at.policy.selection is not Choice.MULTI_RESOURCE:
        return ()
    return kept.first_real_time(at.now, at.times.most_s, min(at.batch, at.room))


def _fill_by_windows(filling: Filling, ranks: Ranks | KeptRanks, waiting: Waiting) -> None:
    """Urgent ones in order; then decodes before prompts, for which what they leave is the budget.

    All of it for real-time requests first: what urgent best-effort ones took of R before them, a prompt had to make up
    for in its last moment, and it was late whenever a step took longer than predicted. AccelGen has both in turn.
    """

    def urgent(is_rt: bool) -> None:
        waits = filling.from_waiting(partial(waiting.urgent, is_rt=is_rt), not is_rt)
        filling.add_all(merge(ranks.urgent(is_rt), waits, key=by_key), is_rt)

    def decodes(is_rt: bool) -> None:
        filling.add_all(ranks.decodes(is_rt), is_rt)

    def prompts(is_rt: bool) -> None:
        rest = filling.from_waiting(partial(waiting.later, is_rt=is_rt), not is_rt)
        ranked = merge(ranks.prompts(is_rt), rest, key=by_key)
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
    filling.add_all(merge(ranks.dropped(), filling.from_waiting(lambda now, _: waiting.late(now)), key=by_key))
