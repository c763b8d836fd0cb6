"""Tell the router the load of a decode worker, every few steps, and for the metrics what ran together in them."""

from __future__ import annotations

from alignedserve.decode_worker.parts.joining import Joining
from alignedserve.decode_worker.parts.receiving import KvReceiving
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import ROUTER, DecodeSteps, Figures, Report

REPORT_STEPS = 8  # between two reports to the router
_COUNTS_S = 1.0  # between two messages with counts


class Reporting:
    def __init__(self, stores: Stores) -> None:
        self._roster, self._pace, self._steps = stores.roster, stores.pace, stores.steps
        self._here, self._candidates, self._batch = stores.here, stores.candidates, stores.batch
        self._memory, self._order = stores.memory, stores.order
        self._reported = 0  # the newest step when the router got a report

    def report(self, now: float) -> list[Command]:
        """Report every few steps, and when there are none."""
        steps = self._steps.number - self._reported
        if not steps or (self._steps.running is not None and steps < REPORT_STEPS):
            return []
        self._reported = self._steps.number
        return [Send(ROUTER, self._report(now))]

    def _report(self, now: float) -> Report:
        chats = [running.promise for running in self._roster.occupants() if running.promise.is_rt]
        return Report(
            num_running=self._here.num_seated,
            band=self._batch.band(self._here.with_kv) or self._span,
            free_pairs=self._memory.num_free,
            batch=self._order.packer.batch,
            times=self._pace.times,
            num_requests=self._candidates.num_requests,
            num_batch=self._candidates.num_in_batch,
            num_buffered=self._candidates.num_buffered,
            num_rt=len(chats),
            num_late=sum(promise.is_late(now) for promise in chats),
        )

    @property
    def _span(self) -> tuple[int, int] | None:
        """Return the shortest and the longest prefix among requests on this device."""
        prefixes = [running.prefix for running in self._here.with_kv]
        return (min(prefixes), max(prefixes)) if prefixes else None


class Counting:
    def __init__(self, stores: Stores, joining: Joining, receiving: KvReceiving) -> None:
        self._counts, self._candidates, self._pace = stores.step_counts, stores.candidates, stores.pace
        self._joining, self._receiving = joining, receiving
        self._told, self._told_at = DecodeSteps(), 0.0

    def tell(self, now: float) -> list[Command]:
        """Tell the router what is new, about once a second while there is anything to do."""
        if now - self._told_at < _COUNTS_S:
            return []
        counted = self._counted
        if counted == self._told:
            return []
        self._told, self._told_at = counted, now
        return [Send(ROUTER, Figures(steps=counted, slowdown=self._pace.slowdown))]

    @property
    def _counted(self) -> DecodeSteps:
        counts = self._counts
        return DecodeSteps(
            tuple(counts.by_batches),
            tuple(counts.by_spread),
            counts.spread_tokens,
            switches=self._joining.num_switches,
            prefetched=self._receiving.num_prefetched,
            in_vain=self._candidates.num_in_vain,
        )
