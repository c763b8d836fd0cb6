"""Tell the router what ran together in a decode worker's steps, for the metrics."""

from __future__ import annotations

from alignedserve.decode_worker.parts.joining import Joining
from alignedserve.decode_worker.parts.receiving import KvReceiving
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import ROUTER, DecodeSteps, Figures

_TOLD_S = 1.0  # between two messages


class Counting:
    def __init__(self, stores: Stores, joining: Joining, receiving: KvReceiving) -> None:
        self._counts, self._candidates, self._pace = stores.step_counts, stores.candidates, stores.pace
        self._joining, self._receiving = joining, receiving
        self._told, self._told_at = DecodeSteps(), 0.0

    def tell(self, now: float) -> list[Command]:
        """Tell the router what is new, about once a second while there is anything to do."""
        if now - self._told_at < _TOLD_S:
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
