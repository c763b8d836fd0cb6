"""The order in which the requests on a decode worker are served, and in which they leave for others."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.core import WorkerLimits
from alignedserve.decode_worker.packing.packer import PackingSetup
from alignedserve.decode_worker.packing.table import packer
from alignedserve.decode_worker.requests.band import RunningBatch
from alignedserve.worker.pace import Pace
from alignedserve.worker.step.limits import Moment
from alignedserve.worker.step.ranks import in_order
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seated import Seated
from alignedserve.worker.step.waiting import Waiting


class ServingOrder:
    def __init__(self, limits: WorkerLimits, pace: Pace, batch: RunningBatch) -> None:
        self._pace, self._batch = pace, batch
        self._seated = Seated(pace.policy)  # decodes in their order, where a step has places for fewer
        setup = PackingSetup(pace.policy, limits.max_batch, self.first_to_leave, lambda: pace.times, batch)
        self.packer = packer(setup)

    def moment(self, now: float) -> Moment:
        """Return what a choice depends on beside the requests."""
        at = self._pace.moment(now)
        at.batch = self.packer.batch
        if self._pace.policy.precedence.may_displace(is_rt=True):
            at.seated = self._seated
        return at

    def moved(self, running: Running) -> None:
        """Note that what the request's place in the order depends on has changed."""
        self._seated.refile(running)

    def first_waiting(self, waiting: Waiting, now: float) -> Running | None:
        """Return the waiting prompt that is served first."""
        if not self._pace.policy.is_plain:
            at = self.moment(now)
            waiting.refresh(at.now, at.times, at.chunk)
        return self.packer.first(waiting, lambda _: True)

    def in_order(self, requests: Sequence[Running], now: float) -> list[Running]:
        """Return these requests in the order in which they are served."""
        return in_order(requests, self.moment(now))

    def first_to_leave(self, requests: Sequence[Running], now: float) -> Running:
        """Return the request of one class that leaves first: the last in the order of service.

        While a batch takes the place of another, it is a request of the old one."""
        return self.in_order(self._batch.old_of(requests), now)[-1]

    def as_they_leave(self, requests: Sequence[Running], now: float) -> list[Running]:
        """Return these best-effort requests, the first to leave last."""
        newest = self._batch.number
        return sorted(self.in_order(requests, now), key=lambda running: running.batch != newest)
