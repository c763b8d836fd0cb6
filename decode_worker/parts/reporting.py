"""Tell the router the load of a decode worker, every few steps."""

from __future__ import annotations

from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.requests.lengths import span_of
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import ROUTER, Report

REPORT_STEPS = 8  # between two reports to the router


class Reporting:
    def __init__(self, stores: Stores) -> None:
        self._roster, self._pace, self._steps = stores.roster, stores.pace, stores.steps
        self._here, self._candidates, self._batch = stores.here, stores.candidates, stores.batch
        self._memory, self._order = stores.memory, stores.order
        self._gives = stores.policy.is_rt_first
        self._reported = 0  # the newest step when the router got a report

    def report(self, now: float) -> list[Command]:
        """Report every few steps, and when there are none."""
        steps = self._steps.number - self._reported
        if not steps or (self._steps.running is not None and steps < REPORT_STEPS):
            return []
        self._reported = self._steps.number
        return [Send(ROUTER, self._report(now))]

    def _report(self, now: float) -> Report:
        here = tuple(self._roster.occupants())
        chats = [running.promise for running in here if running.promise.is_rt]
        return Report(
            num_running=self._here.num_seated,
            band=self._batch.band(self._here.with_kv) or span_of(self._here.with_kv),
            free_pairs=self._memory.num_free,
            batch=self._order.scheduler.batch,
            times=self._pace.times,
            num_requests=self._candidates.num_requests,
            num_batch=self._candidates.num_in_batch,
            num_buffered=self._candidates.num_buffered,
            num_rt=len(chats),
            num_late=sum(promise.is_late(now) for promise in chats),
            given_pairs=sum(len(running.pairs) for running in here if not running.promise.is_rt) if self._gives else 0,
        )
