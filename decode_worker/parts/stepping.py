"""Plan a step of a decode worker: memory for the next tokens, the choice, and a step ahead of the one in flight."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import CacheKind, Decode, StepPlan
from alignedserve.cost.model import Kind
from alignedserve.decode_worker.parts.joining import Joining
from alignedserve.decode_worker.parts.leaving import AHEAD_STEPS, Leaving
from alignedserve.decode_worker.parts.own_choice import own_packing
from alignedserve.decode_worker.parts.preempting import Preempting
from alignedserve.decode_worker.parts.seats import Fetching
from alignedserve.decode_worker.parts.step_ahead import StepAhead, ahead_of
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.protocol.commands import Command, SetTimer
from alignedserve.scheduling.policy import Packing
from alignedserve.worker.parts.prefixes import Prefixes
from alignedserve.worker.parts.step_end import begin_step
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.view import Selection, StepView

_ANSWER = "answer"  # timer: the next step waits no longer for the pool


class Stepping:
    def __init__(
        self,
        stores: Stores,
        prefixes: Prefixes,
        fetching: Fetching,
        joining: Joining,
        preempting: Preempting,
        leaving: Leaving,
    ) -> None:
        self._limits, self._pace, self._steps = stores.limits, stores.pace, stores.steps
        self._here, self._counts, self._queue = stores.here, stores.step_counts, stores.queue
        self._memory, self._order = stores.memory, stores.order
        self._own = own_packing(stores.policy, stores.here)  # None: the scheduler chooses among all
        self._prefixes, self._writer = prefixes, stores.writer
        self._joining, self._preempting, self._leaving = joining, preempting, leaving
        self._fetching, self._copies_beside = fetching, stores.copies_beside
        self._looks_ahead = stores.setup.look_ahead > 0
        why_not = stores.policy.why_not_ahead
        assert not (self._looks_ahead and why_not), why_not
        self._all_run = False  # whether the newest choice left out no request that could decode
        self.num_ahead_steps = 0  # planned while another ran

    def plan(self, now: float) -> list[Command]:
        """Plan the next step where none runs, and the one after it where that is possible."""
        if self._steps.running is not None:
            return self._plan_ahead(self._steps.running, now)
        if self._awaits_copies:
            return []
        if now < self._prefixes.answered_by and (self._here.num_seated or self._queue.waiting):
            return [SetTimer(_ANSWER, self._prefixes.answered_by)]
        before = self._give_memory(now)
        selection = self._next_step(before, now)
        before += self._fetching.fetch(now)
        if selection is None:
            return before
        self._counts.count(selection.decodes)
        before += self._memory.copies()
        decodes = _decodes_of(selection)
        self._all_run = len(decodes) == len(self._here.residents)
        if not self._all_run:
            self._count_held_back(selection)
        begun = begin_step(self._steps, selection, decodes)
        running = self._steps.running
        return [*before, *begun, *(self._plan_ahead(running, now) if running is not None else ())]

    @property
    def _awaits_copies(self) -> bool:
        """Return whether pages are being copied between two steps: their requests are to run in the next one."""
        return not self._copies_beside and bool(self._here.joining or self._here.fetching)

    def _count_held_back(self, selection: Selection) -> None:
        prompts = map(self._here.running_of, selection.chunks)
        num_rt = sum(running.promise.is_rt for running in prompts)
        self._counts.count_held_back(self._here.residents.values(), selection.decodes, num_rt)

    # --- Memory

    def _give_memory(self, now: float) -> list[Command]:
        """Give each decode a place for its next token; where memory is short, requests leave."""
        policy = self._pace.policy
        if policy.packing is Packing.KNAPSACK:
            return self._memory.assign(self._preempting, self._queue.waiting, now)
        commands = self._memory.grow(self._preempting, now) if policy.grows else []
        commands += self._leaving.evict_ahead(now)
        return [*commands, *self._swap(now)] if policy.swaps else commands

    def _swap(self, now: float) -> list[Command]:
        """Seat prompts that take memory from requests of lower levels, each of them once.

        A request that left has less to do while its pages may be found again than when it is to be computed anew: two
        of those could take the same memory from each other for ever.
        """
        commands, waiting, seated = list[Command](), self._queue.waiting, set[Running]()
        while (prompt := self._order.first_waiting(waiting, now)) is not None and prompt not in seated:
            left = self._preempting.swap_for(prompt, self._memory.room_for(prompt), now)
            if left is None or not self._memory.seat_prompt(prompt, waiting, now):
                break
            commands += left
            self._preempting.seat(prompt)
            seated.add(prompt)
        return commands

    def _make_room(self, before: list[Command], now: float) -> bool:
        """Make room where nothing can run; return whether there is some. Commands for that are added to `before`."""
        commands = self._memory.make_room(self._preempting, now)
        before += commands or ()
        return commands is not None

    @property
    def _copies_s(self) -> float:
        """Return the time of copies that come before the step: gaps between tokens are longer by as much."""
        return self._writer.num_between_steps * self._pace.copy_token_s

    # --- The choice

    def _next_step(self, before: list[Command], now: float) -> Selection | None:
        """Choose the next step; None where nothing can run. Commands that must come before it are added to `before`.

        A choice gives prompts seats. Where the pool has pages of one, these are fetched first, and the step is chosen
        again without it. A request that had left may get its seat by one choice and be recomputed by the next.
        """
        while not self._awaits_copies:
            num_fetching = len(self._here.fetching)
            selection = self._choose(before, now)
            if len(self._here.fetching) > num_fetching:
                continue
            if selection.chunks or selection.decodes:
                return selection
            if not (selection.seated or self._lets_all_run() or self._make_room(before, now)):
                return None
        return None

    def _choose(self, before: list[Command], now: float) -> Selection:
        """Choose what may run in the next step, and give prompts seats."""
        seats = self._limits.max_batch - self._here.num_seated if self._joining.takes_prompts(now) else 0
        scheduler, waiting = self._order.scheduler, self._queue.waiting
        decodes, prompts = self._memory.runnable()
        if self._own is not None:
            decodes, prompts = self._own.chosen(decodes, prompts) or (decodes, prompts)
        seating = self._memory.seating(0 if self._memory.is_crowded else seats, waiting, now)
        at = self._order.context(now + self._copies_s)
        selection = scheduler.plan(StepView(decodes, prompts, waiting, at, seating, self._here.seated))
        for running in selection.unseated:
            before += self._preempting.preempt_replaced(running, next(iter(selection.seated), None))
        num_fetching = len(self._here.fetching)
        for prompt in selection.seated:
            self._preempting.seat(prompt)
        if len(self._here.fetching) == num_fetching:
            scheduler.planned(selection)
            if self._own is not None:
                self._own.planned(selection)
        selection, commands = self._memory.settle(selection, now)
        before += commands
        return selection

    def _lets_all_run(self) -> bool:
        """Let all seated requests run where a policy of one's own chose some that cannot; return whether it did."""
        return self._own is not None and self._own.lets_all_run()

    # --- The step after the one in flight

    def _plan_ahead(self, running: StepPlan, now: float) -> list[Command]:
        """Plan the step after the one that runs, where no result of that one changes which requests run (ahead.py)."""
        if not self._looks_ahead or self._steps.has_next or not self._is_settled(running, now):
            return []
        ahead = ahead_of(running, self._here.residents.values(), self._memory.blocks, self._limits.block_size)
        if ahead is None or not 0 < len(ahead.going) <= min(self._pace.room.tokens, self._order.scheduler.batch):
            return []
        shape = ahead.shape
        predicted_s = self._pace.cost.seconds(shape)
        if not self._is_in_time(ahead, running.predicted_s, predicted_s, now):
            return []
        selection = Selection(ahead.going, (), shape, predicted_s)
        self._order.scheduler.planned(selection)
        self._counts.count(ahead.going)
        self.num_ahead_steps += 1
        return begin_step(self._steps, selection, tuple(ahead.decodes))

    def _is_settled(self, running: StepPlan, now: float) -> bool:
        """Return whether every request that is here decodes in it, or has joined since, and has memory to go on."""
        has_prompts = running.chunks or self._queue.waiting or self._here.unfinished or self._prefixes.asking
        if has_prompts or self._steps.runs_in_vain or not self._all_run:
            return False
        first = self._joining.next_candidate(now)
        if first is not None and self._joining.cannot_wait(first, now):
            return False  # other requests leave for it before the next step
        return self._leaving.has_room_for(AHEAD_STEPS + 1)

    def _is_in_time(self, ahead: StepAhead, running_s: float, ahead_s: float, now: float) -> bool:
        """Return whether no gap is longer than promised, and no new request waits for two steps longer than for one."""
        if not self._order.scheduler.bounds_steps:
            return True
        at = self._order.context(now)
        careful = at.caution(Kind.DECODE)
        one_s, both_s = careful * ahead_s, careful * (running_s + ahead_s)
        gaps = [(running, one_s) for running in ahead.going] + [(running, both_s) for running in ahead.sitting_out]
        is_kept = all(gap_s <= running.request.slo.tbt_s for running, gap_s in gaps if running.promise.is_rt)
        return both_s <= at.calm_s and is_kept


def _decodes_of(selection: Selection) -> tuple[Decode, ...]:
    kv = CacheKind.KV
    decodes = [  # one for each token: a call for each would cost as much again, and a keyword half as much
        Decode(
            of.id,
            running.output[-1],
            running.prefix,
            running.pairs,
            of.sampling,
            len(running.output),
            running.history,
            running.from_right,
            running.dropped,
            kv,
            (),
            of.adapter,
        )
        for running in selection.decodes
        for of in (running.request,)
    ]
    if selection.shape.hidden:
        decodes = [*map(_as_kept, selection.decodes, decodes)]
    return tuple(decodes)


def _as_kept(running: Running, decode: Decode) -> Decode:
    if not running.blocks:
        return decode
    return replace(decode, pairs=(), kind=CacheKind.HIDDEN, blocks=running.blocks)
