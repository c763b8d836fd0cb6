"""Counts of a decode worker's steps: the batches whose members ran together, how far their prefixes lay apart, and
which best-effort requests sat out a step for real-time ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.protocol.figures import SPREADS
from alignedserve.worker.counts import Buckets
from alignedserve.worker.step.running import Running


class StepCounts:
    def __init__(self) -> None:
        self.by_batches = [0, 0, 0]  # members of no batch (guests alone), of one, of two or more
        self.spread = Buckets(SPREADS)
        self.num_held_back = 0  # best-effort requests that could decode, once for each step

    def count(self, decodes: Sequence[Running]) -> None:
        if not decodes:
            return
        batches, prefixes = {running.batch for running in decodes}, [running.prefix for running in decodes]
        self.by_batches[min(len(batches - {0}), 2)] += 1
        self.spread.count(max(prefixes) - min(prefixes))

    def count_held_back(self, residents: Iterable[Running], decodes: Sequence[Running], num_rt_prompts: int) -> None:
        """Count the best-effort residents that a step with real-time requests leaves out."""
        if not num_rt_prompts and not any(running.promise.is_rt for running in decodes):
            return
        chosen = set(decodes)
        left_out = (running for running in residents if running not in chosen)
        self.num_held_back += sum(not running.promise.is_rt for running in left_out)
