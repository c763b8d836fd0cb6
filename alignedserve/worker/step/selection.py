"""Choose the decodes and prompt chunks of a step: the most urgent promises first, as far as time and room go.

A worker that only runs prompts and one that decodes beside them choose alike (AccelGen §4.2, §4.4, BROS §4.2):

    R        the time that the step may take: what the tightest real-time request leaves for it. Real-time decodes
             may fill it; all else runs only as far as it is in time if the step takes longer than predicted
    budget   prompt tokens: as many as stay within R, at most four times what saturates the hardware
    order    urgent RT, other RT, urgent BE, other BE; of each decodes before prompts
    choice   in that order; with selection multi_resource, of the prompts about as urgent what fills time and memory
             best (windows.py)

Waiting prompts are chosen together with seated requests, and get their seats when they are chosen. Only the last prompt
of a step is cut. No prompt takes memory ahead of another that waits for more of it, unless both are about as urgent:
else a large prompt would wait for ever.

No best-effort request makes a real-time one late: whatever the order says, a step stays within R. Two exceptions keep
work going: the first of the order runs alone where nothing fits, and the first real-time prompt gets a block of tokens
in each step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import chain, islice

from alignedserve.cost.model import Kind
from alignedserve.scheduling.policy import Chunking, Policy, PromptChoice
from alignedserve.scheduling.slo import Late
from alignedserve.worker.step.chunks import cut, whole
from alignedserve.worker.step.filling import Filling
from alignedserve.worker.step.limits import Moment, Selection, all_of, caution, prompt_budget, rules_of, step_bounds
from alignedserve.worker.step.lines import Ranked
from alignedserve.worker.step.ranks import KeptRanks, RankedRequests, key_of, ranked, ranked_by_arrival
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seated import Seated
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.waiting import Waiting


def select(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, seating: Seating
) -> Selection:
    """Return what the next step runs, of requests that are seated and prompts that wait."""
    if at.seated is not None and len(decodes) <= at.batch:
        at.seated.forget()
    return _chooser_of(at.policy).choose(decodes, prompts, waiting, at, seating)


def first_come(policy: Policy, waiting: Waiting) -> Waiting | tuple[Running, ...]:
    """Return the waiting prompts that are seated before a step is chosen, as far as there is room.

    These are all, in order of arrival, for policies that serve first come, first served; otherwise there are none.
    """
    return _chooser_of(policy).first_come(waiting)


class Chooser(ABC):
    """A way to put a step together."""

    @abstractmethod
    def first_come(self, waiting: Waiting) -> Waiting | tuple[Running, ...]:
        """Return the waiting prompts that are seated before a step is chosen."""

    @abstractmethod
    def choose(
        self, decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, seating: Seating
    ) -> Selection:
        """Return what the next step runs."""


class FirstCome(Chooser):
    """Runs requests in the order of arrival. Prompts were seated before, so there is nothing to choose."""

    def first_come(self, waiting: Waiting) -> Waiting | tuple[Running, ...]:
        return waiting

    def choose(
        self, decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, seating: Seating
    ) -> Selection:
        if at.policy.chunking is Chunking.NONE and prompts:
            return all_of((), whole(prompts, at.room), at)
        return all_of(decodes[: at.room], cut(prompts, at.room - len(decodes)), at)


class Fitting(Chooser):
    """Runs what fits into the time of a step, by promises or by another order."""

    def first_come(self, waiting: Waiting) -> Waiting | tuple[Running, ...]:
        return ()

    def choose(
        self, decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, seating: Seating
    ) -> Selection:
        waiting.refresh(at.now, at.times, at.chunk)
        if at.policy.chunking is Chunking.NONE:
            return _prompts_or_decodes(decodes, prompts, waiting, at, seating)
        if not prompts and not waiting and len(decodes) <= min(at.room, at.batch):
            everything = all_of(decodes, (), at)
            if everything.predicted_s <= step_bounds(decodes, (), waiting, at).all_s / caution(at, Kind.DECODE):
                return everything
        return _filled(decodes, prompts, waiting, at, seating)


_FIRST_COME, _FITTING = FirstCome(), Fitting()


def _chooser_of(policy: Policy) -> Chooser:
    return _FIRST_COME if policy.is_plain else _FITTING


def _prompts_or_decodes(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, seating: Seating
) -> Selection:
    """Return a step of whole prompts; one of decodes where no prompt can run."""
    found = _filled((), prompts, waiting, at, seating) if prompts or waiting else None
    if found is not None and not found.is_empty:
        return found
    if len(decodes) > at.batch:
        return _filled(decodes, (), Waiting(at.policy), at, seating)
    return all_of(decodes[: at.room], (), at)


def _filled(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, seating: Seating
) -> Selection:
    kept = at.seated if len(decodes) > at.batch else None
    if kept is not None:
        kept.refresh(decodes, at.now, at.times)
    bounds = step_bounds(decodes, prompts, waiting, at, kept)
    filling = Filling(bounds, prompt_budget(decodes, prompts, waiting, at), at, seating, waiting.look)
    first = _first(decodes, prompts, waiting, at, kept)
    seated: Sequence[Running] = (*decodes, *prompts)
    if filling.add_decodes(first) and kept is None:
        taken = set(map(id, first)) if len(first) < len(decodes) else None
        left = () if taken is None else [running for running in decodes if id(running) not in taken]
        seated = (*left, *prompts)
    # Thousands of best-effort prompts may wait for pages: where there are none, they are not looked at.
    in_order = partial(waiting.line.in_order, only_rt=not seating.takes_best_effort)
    fill = _FILLS[at.policy.selection, at.policy.ordering.goes_by_promises]
    ranks = fill(filling, _Sources(seated, prompts, waiting, in_order, kept, at))
    if filling.is_empty:
        filling.add_one_alone(merge(ranks, in_order(at.now, at.times.most_s), key=key_of), ranks)
    if kept is not None:
        kept.note_run(filling.decodes)
    return filling.selection


# --- What runs before all others


def _first(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment, kept: Seated | None
) -> Sequence[Running]:
    """Return the decodes that come before all other requests, if there is time for all of them."""
    if kept is not None:
        return _before_others(kept, prompts, waiting, at)
    return _before_prompts(decodes, prompts, waiting, at) if at.policy.ordering.goes_by_promises else decodes


def _before_prompts(
    decodes: Sequence[Running], prompts: Sequence[Running], waiting: Waiting, at: Moment
) -> Sequence[Running]:
    """Return decodes that run whatever prompts there are.

    Real-time ones: a decode that is left out would be late more often than a prompt that gets a little less.
    Best-effort ones only beside best-effort prompts that are not urgent: a real-time prompt would creep beside them,
    and need more steps.
    """
    now, most_s, late = at.now, at.times.most_s, at.policy.late
    if late is Late.DROP_LAST:
        return [running for running in decodes if running.promise.is_rt and not running.promise.is_late(now)]
    is_urgent = any(next(waiting.line.urgent(now, most_s, is_rt), None) for is_rt in (True, False)) or any(
        running.promise.standing(now, running.work(at.chunk), at.times).slack_s <= most_s for running in prompts
    )
    if is_urgent or _has_rt(prompts, waiting):
        return [running for running in decodes if running.promise.is_rt]
    return decodes


def _before_others(kept: Seated, prompts: Sequence[Running], waiting: Waiting, at: Moment) -> Sequence[Running]:
    """Return the same where there are more decodes than places: real-time ones, all or none beside a real-time prompt.

    Without such a prompt they come first in any case, as many as have places: to look at each alone would take half of
    the choice.
    """
    if _has_rt(prompts, waiting):
        return kept.real_time()
    if not at.policy.ordering.goes_by_promises:
        return ()
    return kept.first_real_time(at.now, at.times.most_s, min(at.batch, at.room))


def _has_rt(prompts: Sequence[Running], waiting: Waiting) -> bool:
    return any(running.promise.is_rt for running in chain(islice(waiting.real_time, 1), prompts))


# --- How the rest is filled


@dataclass(slots=True)
class _Sources:
    """The requests that a step is filled from."""

    seated: Sequence[Running]  # without decodes that run in any case
    prompts: Sequence[Running]
    waiting: Waiting
    in_order: Callable[[float, float], Iterator[Ranked]]  # of those that wait
    kept: Seated | None  # decodes in their order, where they are more than a step has places for
    at: Moment

    @property
    def ranks(self) -> RankedRequests | KeptRanks:
        """Return seated requests ranked by promises."""
        if self.kept is None:
            return RankedRequests.build(self.seated, self.at)
        return KeptRanks(self.kept, self.prompts, self.at)


def _fill_in_order(filling: Filling, sources: _Sources) -> Iterable[Ranked]:
    """Fill a step in the order of the policy, and return the order of seated requests."""
    ranks: Iterable[Ranked] = ranked(sources.seated, sources.at) if sources.kept is None else sources.ranks
    filling.add_all(merge(ranks, filling.from_waiting(sources.in_order), key=key_of))
    return ranks


def _fill_windows_by_arrival(filling: Filling, sources: _Sources) -> Iterable[Ranked]:
    """Fill a step with decodes, and then with prompts that came at about the same time."""
    ranks = ranked_by_arrival(sources.seated)
    filling.add_all(found for found in ranks if found[1].decodes)
    prompts = ((0, running) for running in sources.prompts if not running.decodes)
    rest = chain(prompts, filling.from_waiting(sources.in_order))
    filling.add_windows(((0, running.request.arrival_at), running) for _, running in rest)
    return ranks


def _fill_by_promises(filling: Filling, sources: _Sources) -> Iterable[Ranked]:
    """Fill a step with urgent requests in order; then with decodes before prompts, for which what they leave is the
    budget."""
    ranks, waiting = sources.ranks, sources.waiting
    chooses = filling.policy.selection is PromptChoice.MULTI_RESOURCE

    def urgent(is_rt: bool) -> None:
        waits = filling.from_waiting(partial(waiting.line.urgent, is_rt=is_rt), not is_rt)
        filling.add_all(merge(ranks.urgent(is_rt), waits, key=key_of), is_rt)

    def decodes(is_rt: bool) -> None:
        filling.add_all(ranks.decodes(is_rt), is_rt)

    def prompts(is_rt: bool) -> None:
        rest = filling.from_waiting(partial(waiting.line.later, is_rt=is_rt), not is_rt)
        ranked = merge(ranks.prompts(is_rt), rest, key=key_of)
        if not chooses or not (is_rt or filling.policy.ranks_be_by_slack):
            filling.add_all(ranked, is_rt)
            return
        ahead = 1 if is_rt else 2  # of a key come before the priority and the slack
        filling.add_windows((key[ahead : ahead + 2], running) for key, running in ranked)

    rules_of(filling.policy).run_stages((urgent, decodes, prompts), filling.hold_back)
    filling.add_all(merge(ranks.dropped(), filling.from_waiting(lambda now, _: waiting.line.late(now)), key=key_of))
    return ranks


# (the policy's choice of prompts, whether its order goes by promises) -> the function that fills a step
_FILLS: Mapping[tuple[PromptChoice, bool], Callable[[Filling, _Sources], Iterable[Ranked]]] = {
    (PromptChoice.IN_ORDER, True): _fill_by_promises,
    (PromptChoice.IN_ORDER, False): _fill_in_order,
    (PromptChoice.MULTI_RESOURCE, True): _fill_by_promises,
    (PromptChoice.MULTI_RESOURCE, False): _fill_windows_by_arrival,
}
