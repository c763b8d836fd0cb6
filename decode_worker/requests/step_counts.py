"""Counts of a decode worker's steps: the batches whose members ran together, and how far their prefixes lay apart."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from alignedserve.protocol.messages import SPREADS
from alignedserve.worker.step.running import Running


class StepCounts:
    def __init__(self) -> None:
        self.by_batches = [0, 0, 0]  # members of no batch (guests alone), of one, of two or more
        self.by_spread = [0] * (len(SPREADS) + 1)
        self.spread_tokens = 0

    def count(self, decodes: Sequence[Running]) -> None:
        if not decodes:
            return
        batches, prefixes = {running.batch for running in decodes}, [running.prefix for running in decodes]
        self.by_batches[min(len(batches - {0}), 2)] += 1
        spread = max(prefixes) - min(prefixes)
        self.by_spread[bisect_left(SPREADS, spread)] += 1
        self.spread_tokens += spread
