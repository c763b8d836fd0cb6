"""Tell the router which requests the worker holds, which have moved on, and how much is left to run; and tell the
gateways, by way of the router, what metrics show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from math import inf

from alignedserve.core import Role
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, MemberJoined, Received
from alignedserve.protocol.figures import ByClass, DecodeLengths, DecodeSteps, WorkerLoad
from alignedserve.protocol.messages import ROUTER, Attempt, Figures, Holding, Inquire, Release, Reserve, Retire
from alignedserve.scheduling.promise import Promise
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.parts.prompt_rate import PromptRate
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.step.running import Running

_COUNTS_S = 1.0  # between two messages


class RouterLink(CorePart):
    def __init__(
        self,
        common: Common,
        rate: PromptRate,
        settled: Callable[[], Collection[Attempt]] = frozenset,
    ) -> None:
        """`settled` returns the attempts that are not here any more and that the pool will hear of anyway."""
        self._roster, self._notes, self._memory = common.roster, common.notes, common.memory
        self._retirement, self._pool = common.retirement, common.pool
        self._rate, self._settled = rate, settled

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(sender, Inquire(attempts)):
                held = set(self._roster.attempts())
                return self._answer(sender, [attempt for attempt in attempts if attempt not in held])
            case MemberJoined(member) if member.role is Role.ROUTER:
                self._notes.renew()
                return [self._holding()]
            case Received(message=Reserve(is_on=True)):
                return [self._holding()]
        return []

    def _answer(self, asker: str, unknown: list[Attempt]) -> list[Command]:
        """Tell the router which attempts are not here; release the pages that the pool keeps for them."""
        if asker == ROUTER or self._pool.member is None:
            for attempt in unknown:
                self._notes.note("unknown", attempt)
            return []
        settled, pool = self._settled(), self._pool.member.name
        return [Send(pool, Release(*attempt)) for attempt in unknown if attempt not in settled]

    def repeat(self, to: str) -> list[Command]:
        return [self._holding()] if to == ROUTER else []

    def _holding(self) -> Command:
        held = tuple(self._roster.attempts())
        taking = self._retirement
        return Send(ROUTER, Holding(held, self._memory.num_free, taking.is_retiring, taking.is_reserved))

    def report(self, now: float) -> list[Command]:
        """Tell the router what it has not been told yet, if anything."""
        progress = self._notes.report(partial(self._rate.backlog, now), self._memory.num_free, now)
        return [] if progress is None else [Send(ROUTER, progress)]


class Counting(CorePart):
    def __init__(
        self,
        common: Common,
        queue: PromptQueue,
        running: Callable[[], Iterable[Running]],
        coming: Callable[[], Iterable[Promise]],
        steps: Callable[[], DecodeSteps] | None = None,
        lengths: Callable[[], DecodeLengths] | None = None,
    ) -> None:
        """`running` returns the requests that may be in a step, `coming` the promises to those that wait elsewhere than
        in the queue, `steps` what ran together in steps, and `lengths` what runs together now."""
        self._counts, self._memory, self._pace = common.counts, common.memory, common.pace
        self._faults, self._retirement = common.faults, common.retirement
        self._queue, self._running, self._coming, self._steps = queue, running, coming, steps
        self._lengths = lengths
        self._told: Figures | None = None
        self._told_at = 0.0

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case MemberJoined(member) if member.role is Role.ROUTER and self._told is not None:
                self._told, self._told_at = None, -inf  # this router knows nothing of it
            case Received(message=Retire()):
                self._told_at = -inf  # the worker may end in this turn
        return []

    def tell(self, now: float) -> list[Command]:
        """Tell what is new, about once a second while anything happens. A worker that has become idle tells it when it
        last asks whether its owners have all tokens (repeats.py)."""
        if now - self._told_at < _COUNTS_S:
            return []
        figures = Figures(
            num_refused=self._faults.num_refused,
            num_failed_transfers=self._faults.num_failed_transfers,
            steps=None if self._steps is None else self._steps(),
            lengths=None if self._lengths is None else self._lengths(),
            slowdown=self._pace.slowdown,
            worker=self._load(now),
        )
        self._told_at = now
        if figures == self._told:
            return []
        self._told = figures
        return [Send(ROUTER, figures)]

    def _load(self, now: float) -> WorkerLoad:
        running, coming = [running.promise for running in self._running()], [*self._coming()]
        queue, counts = self._queue.waiting, self._counts
        here, moving = _by_class(running), _by_class(coming)
        in_queue = [waiting.promise for waiting in queue.real_time]
        dues = [promise.due_at(now) for promise in chain(running, coming, in_queue) if promise.is_rt]
        return WorkerLoad(
            here,
            ByClass(queue.num_rt + moving.rt, len(queue) - queue.num_rt + moving.be),
            used=1 - self._memory.free_share,
            slack_s=min(dues) - now if dues else None,
            step_tokens=counts.step_tokens.tally,
            step_s=counts.step_s.tally,
            step_ratio=counts.step_ratio.tally,
            length_ratio=counts.length_ratio.tally,
            preempted=counts.preempted,
            is_retiring=self._retirement.is_retiring,
        )


def _by_class(promises: Sequence[Promise]) -> ByClass:
    num_rt = sum(promise.is_rt for promise in promises)
    return ByClass(num_rt, len(promises) - num_rt)
