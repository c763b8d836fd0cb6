"""The order in which the requests on a decode worker are served, and in which they leave for others."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.core import WorkerLimits
from alignedserve.decode_worker.packing.packer import PackingSetup
from alignedserve.decode_worker.packing.table import packer
from alignedserve.decode_worker.requests.band import RunningBatch
from alignedserve.decode_worker.requests.occupancy import Occupancy
from alignedserve.scheduling.expected_wait import InLine, expected_waits
from alignedserve.scheduling.levels import level_of
from alignedserve.scheduling.promise import tokens_left
from alignedserve.worker.pace import Pace
from alignedserve.worker.step.limits import Moment
from alignedserve.worker.step.ranks import in_order
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seated import Seated


class ServingOrder:
    def __init__(self, limits: WorkerLimits, pace: Pace, here: Occupancy, batch: RunningBatch) -> None:
        self._pace, self._here, self._batch = pace, here, batch
        self._seated = Seated(pace.policy)  # decodes in their order, where a step has places for fewer
        self.packer = packer(PackingSetup(pace.policy, limits.max_batch, self.first_to_leave, batch))

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

    def in_order(self, requests: Sequence[Running], now: float) -> list[Running]:
        """Return these requests in the order in which they are served."""
        return in_order(requests, self.moment(now))

    def first_to_leave(self, requests: Sequence[Running], now: float) -> Running:
        """Return the request of one class that leaves first.

        While a batch takes the place of another, it is a request of the old one: the best-effort request with the
        longest wait (ALISE §3.2), and the longer of two with equal waits; or the real-time request with most slack."""
        line = self.in_order(self._batch.old_of(requests), now)
        if line[-1].promise.is_rt:
            return line[-1]
        return self.by_wait(line, now)[-1]

    def as_they_leave(self, requests: Sequence[Running], now: float) -> list[Running]:
        """Return these best-effort requests, the first to leave last."""
        return self.by_wait(self.in_order(requests, now), now)

    def by_wait(self, line: Sequence[Running], now: float) -> list[Running]:
        """Return best-effort requests that are served in the order of `line`, the first to leave last."""
        seats, age_s, newest = max(1, self._here.num_seated), self._pace.policy.age_s, self._batch.number
        waits = expected_waits((self._in_line(running, now) for running in line), seats, age_s)
        ranked = [
            ((running.batch != newest, wait_s, running.prefix), running)
            for wait_s, running in zip(waits, line, strict=True)
        ]
        return [running for _, running in sorted(ranked, key=lambda rank: rank[0])]

    def _in_line(self, running: Running, now: float) -> InLine:
        tokens = tokens_left(running.request, self._pace.policy, len(running.output))
        level = None if running.promise.is_rt else level_of(tokens)
        return InLine(tokens * self._pace.times.mean_s, now - running.said_at, level)
