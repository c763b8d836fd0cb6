"""What a worker tells the router: what it takes and holds, which requests moved on, how much is left, figures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from math import inf

from alignedserve.protocol.commands import Command, End, Send
from alignedserve.protocol.events import MemberJoined, MemberLost, Received
from alignedserve.protocol.figures import ByClass, DecodeLengths, DecodeSteps, WorkerLoad
from alignedserve.protocol.messages import ROUTER, Attempt, Figures, Holding, Inquire, Reserve, Retire
from alignedserve.scheduling.promise import Promise
from alignedserve.worker.arriving import PromptQueue
from alignedserve.worker.log import WorkerLog
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.owners import Outputs
from alignedserve.worker.pace import Pace
from alignedserve.worker.part import CorePart
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.requests import Requests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.steps import PromptRate

_COUNTS_S = 1.0  # between two messages


class RouterLink(CorePart):
    """Tells the router which requests are here, which have moved on, and how much is left to run."""

    def __init__(
        self,
        here: Requests,
        memory: PlainMemory,
        pool: PoolLink,
        log: WorkerLog,
        outputs: Outputs,
        rate: PromptRate,
        settled: Callable[[], Collection[Attempt]],
    ) -> None:
        """`settled` returns the attempts that are not here any more and that the pool will hear of anyway."""
        self._here, self._memory, self._steps, self._pool = here, memory, memory.steps, pool
        self._notes, self._outputs, self._rate, self._settled = log.notes, outputs, rate, settled

    def retire(self, message: Retire, frame: Received, now: float) -> None:
        self._here.is_retiring = True

    def reserve(self, message: Reserve, frame: Received, now: float) -> list[Command]:
        self._here.is_reserved = message.is_on
        return [self._holding()] if message.is_on else []

    def router_lost(self, event: MemberLost, now: float) -> None:
        self._here.is_reserved = False  # its next life says so again

    def inquired(self, message: Inquire, frame: Received, now: float) -> list[Command]:
        held = set(self._here.attempts())
        return self._answer(frame.sender, [attempt for attempt in message.attempts if attempt not in held], now)

    def router_joined(self, event: MemberJoined, now: float) -> list[Command]:
        self._notes.renew()
        return [self._holding()]

    def _answer(self, asker: str, unknown: list[Attempt], now: float) -> list[Command]:
        """Tell the router which attempts are not here; release the pages that the pool keeps for them."""
        if asker == ROUTER or self._pool.member is None:
            for attempt in unknown:
                self._notes.note("unknown", attempt)
            return []
        settled = self._settled()
        left = [attempt for attempt in unknown if attempt not in settled]
        return [command for attempt in left for command in self._pool.holds.decline(attempt, now)]

    def repeat(self, to: str) -> list[Command]:
        return [self._holding()] if to == ROUTER else []

    def _holding(self) -> Command:
        held = tuple(self._here.attempts())
        return Send(ROUTER, Holding(held, self._memory.num_free, self._here.is_retiring, self._here.is_reserved))

    def report(self, now: float) -> list[Command]:
        """Tell the router what it has not been told yet, if anything."""
        progress = self._notes.report(partial(self._rate.backlog, now), self._memory.num_free, now)
        return [] if progress is None else [Send(ROUTER, progress)]

    def end(self, now: float) -> list[Command]:
        """End the worker if it retires and is idle: its requests have gone on, and their owners have the tokens."""
        is_idle = self._here.is_retiring and self._steps.running is None and not self._outputs.num_kept
        return [End()] if is_idle and not self._here.attempts() else []


class Counting(CorePart):
    """Tells the gateways, by way of the router, what metrics show."""

    def __init__(
        self,
        here: Requests,
        log: WorkerLog,
        memory: PlainMemory,
        pace: Pace,
        queue: PromptQueue,
        running: Callable[[], Iterable[WorkerRequest]],
        coming: Callable[[], Iterable[Promise]],
        steps: Callable[[], DecodeSteps],
        lengths: Callable[[], DecodeLengths],
    ) -> None:
        """`running` returns the requests that may be in a step, `coming` the promises to those that wait elsewhere than
        in the queue, `steps` what ran together in steps, and `lengths` what runs together now."""
        self._here, self._counts, self._faults = here, log.counts, log.faults
        self._memory, self._pace = memory, pace
        self._queue, self._running, self._coming, self._steps = queue, running, coming, steps
        self._lengths = lengths
        self._told: Figures | None = None
        self._told_at = 0.0

    def router_joined(self, event: MemberJoined, now: float) -> None:
        if self._told is not None:
            self._told, self._told_at = None, -inf  # this router knows nothing of it

    def retire(self, message: Retire, frame: Received, now: float) -> None:
        self._told_at = -inf  # the worker may end in this turn

    def tell(self, now: float) -> list[Command]:
        """Tell what is new, about once a second while anything happens. A worker that has become idle tells it when it
        last asks whether its owners have all tokens (core.py)."""
        if now - self._told_at < _COUNTS_S:
            return []
        figures = Figures(
            num_refused=self._faults.num_refused,
            num_failed_transfers=self._faults.num_failed_transfers,
            steps=self._steps(),
            lengths=self._lengths(),
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
            is_retiring=self._here.is_retiring,
        )


def _by_class(promises: Sequence[Promise]) -> ByClass:
    num_rt = sum(promise.is_rt for promise in promises)
    return ByClass(num_rt, len(promises) - num_rt)
