"""Prompts that were run on a node without a pool, and find no seat here: they are taken in for the pool of our node.

    Offer (has_pool false) ─▶ candidate ── room: Pull ──▶ resident
                                  └── no seat for it: Pull, without a seat ──▶ copied to pages ──▶ Commit: it waits

So batches are made of them as of all others, and no prefill worker's memory holds them for long. Only best-effort ones:
a real-time request joins before the candidate batch in any case, and waits for that where it is. Those that join next
stay where they are, too. Nothing waits for this: there are pairs that nobody else needs within some steps, and pages at
hand, or it waits on the prefill worker's device.
"""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.core import units_for
from alignedserve.decode_worker.candidates import Candidate
from alignedserve.decode_worker.evicting import AHEAD_STEPS, EvictingCore
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import SPARE
from alignedserve.worker.core import WorkerSetup
from alignedserve.worker.step.running import Running

STOCK = 8  # so many times as many requests may run as are candidates that join as others end


class TakingInCore(EvictingCore):
    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self.num_taken_in = 0  # requests that were committed so

    def _take_in(self) -> list[Command]:
        homeless, commands = list(self._homeless()), list[Command]()
        if not homeless:  # nearly always, and what follows looks at all that run here
            return commands
        coming = sum(self._writer.pages_for(one, one.prefix) for one in self._candidates.for_pool)
        at_hand = self._writer.num_at_hand(SPARE) - coming if self._writes_to is not None else 0
        spare = self._blocks.num_free - self._pairs_needed(AHEAD_STEPS)
        for one in homeless:
            assert one.source is not None, "a prefill worker has its KV"
            running, pairs = self._running_from(one.entry), units_for(one.entry.prefix, self._limits.block_size)
            at_hand, spare = at_hand - self._writer.pages_for(running, running.prefix), spare - pairs
            taken = self._blocks.take(pairs) if min(at_hand, spare) >= 0 else None
            if taken is None:
                break
            running.pairs = taken
            self._candidates.take(one)
            self._notes.moved("joined", one.key)  # from now on it is lost with us
            commands += self._drop(one.key[0], one.key[1] - 1)
            receiving = self._candidates.pull(one, running, one.source, is_for_pool=True)
            commands += [receiving.command, receiving.pull]
        return commands

    def _homeless(self) -> Iterator[Candidate]:
        """In the order in which they would join, without those that join next."""
        joins_next = max(1, self._limits.max_batch // STOCK)
        for place, one in enumerate(self._candidates.requests):
            is_best_effort = not (one.has_pool or one.is_rt or one.is_pinned)
            if is_best_effort and one.evicted is None and place >= joins_next and not self._is_retiring:
                yield one

    @property
    def _pages_to_take_in(self) -> int:
        """That the next one would need."""
        one = next(self._homeless(), None)
        return 0 if one is None else units_for(one.entry.prefix, self._limits.page_size)

    def _came_for_pool(self, running: Running) -> list[Command]:
        """Others may have got the pages meanwhile: then it is computed anew."""
        pool = self._writes_to
        if pool is None or self._writer.pages_for(running, running.prefix) > self._writer.num_at_hand(SPARE):
            self._put_back(running)
            return []
        self.num_taken_in += 1
        copy = self._writer.begin(running, pool, running.prefix, SPARE)
        self._vacate(running)  # whoever writes there does so after the copy
        running.pairs = ()
        return [copy]
