"""The order in which the requests on a decode worker are served, and in which they leave for others."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.core import WorkerLimits
from alignedserve.decode_worker.requests.band import RunningBatch
from alignedserve.schedulers.scheduler import SchedulerSetup
from alignedserve.schedulers.table import scheduler_of
from alignedserve.worker.pace import Pace
from alignedserve.worker.step.decode_order import DecodeOrder
from alignedserve.worker.step.ranks import in_order
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.view import StepContext
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class ServingOrder:
    def __init__(self, limits: WorkerLimits, pace: Pace, batch: RunningBatch) -> None:
        self._pace, self._batch = pace, batch
        self._seated = DecodeOrder(pace.policy)  # decodes in their order, where a step has places for fewer
        times, old_of = lambda: pace.times, batch.old_of
        setup = SchedulerSetup(pace.policy, limits.max_batch, self.first_to_leave, times, old_of)
        self.scheduler = scheduler_of(setup)

    def context(self, now: float) -> StepContext:
        """Return what the plan of a step depends on beside the requests."""
        at = self._pace.context(now)
        at.batch = self.scheduler.batch
        if self._pace.policy.is_rt_first:
            at.seated = self._seated
        return at

    def moved(self, running: Running) -> None:
        """Note that what the request's place in the order depends on has changed."""
        self._seated.refile(running)

    def first_waiting(self, waiting: WaitingPrompts, now: float) -> Running | None:
        """Return the waiting prompt that is served first."""
        if not self._pace.policy.is_plain:
            at = self.context(now)
            waiting.refresh(at.now, at.times, at.chunk)
        return self.scheduler.first(waiting, lambda _: True)

    def in_order(self, requests: Sequence[Running], now: float) -> list[Running]:
        """Return these requests in the order in which they are served."""
        return in_order(requests, self.context(now))

    def first_to_leave(self, requests: Sequence[Running], now: float) -> Running:
        """Return the request of one class that leaves first: the last in the order of service.

        While a batch takes the place of another, it is a request of the old one."""
        return self.in_order(self._batch.old_of(requests), now)[-1]

    def as_they_leave(self, requests: Sequence[Running], now: float) -> list[Running]:
        """Return these best-effort requests, the first to leave last."""
        newest = self._batch.number
        return sorted(self.in_order(requests, now), key=lambda running: running.batch != newest)
