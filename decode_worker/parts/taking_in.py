"""Prompts that were run on a node without a pool, and find no seat here: they are taken in for the pool of this node.

    Offer (has_pool false) ─▶ candidate ── room: Pull ──▶ resident
                                  └── no seat for it: Pull, without a seat ──▶ copied to pages ──▶ Commit: it waits

So batches are made of them as of all others, and no prefill worker's memory holds them for long. Only best-effort ones
are taken in: a real-time request joins before the candidate batch in any case, and waits for that where it is. The
candidates that join next stay where they are, too. Nothing waits for this: there are pairs that no other request needs
within some steps, and pages at hand, or the prompt waits on the prefill worker's device.
"""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.core import units_for
from alignedserve.decode_worker.parts.leaving import AHEAD_STEPS
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.parts.writing import PageWriting
from alignedserve.decode_worker.requests.candidates import JoinCandidate
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import SPARE
from alignedserve.scheduling.policy import Handoff
from alignedserve.worker.step.running import Running

STOCK = 8  # so many times as many requests may run as are candidates that join as others end


class TakingIn:
    def __init__(self, stores: Stores, writing: PageWriting) -> None:
        self._limits, self._policy, self._roster = stores.limits, stores.policy, stores.roster
        self._here, self._candidates, self._memory = stores.here, stores.candidates, stores.memory
        self._queue, self._retirement, self._notes = stores.queue, stores.retirement, stores.notes
        self._writing = writing
        self.num_taken_in = 0  # requests that were committed so

    def take_in(self, now: float) -> list[Command]:
        """Have prompts sent here that wait on nodes without a pool, as far as there are spare pairs and pages."""
        homeless, commands = list(self._homeless()), list[Command]()
        if not homeless:  # nearly always, and what follows looks at all that run here
            return commands
        at_hand = self._num_spare_pages
        spare = self._memory.num_free - self._here.pairs_needed(AHEAD_STEPS, self._limits.block_size)
        for candidate in homeless:
            if candidate not in self._candidates.requests:  # an older attempt of one that was taken in just now
                continue
            running = candidate.as_running(self._policy, self._limits.page_size)
            pairs = units_for(candidate.entry.num_held, self._limits.block_size)
            at_hand, spare = at_hand - self._pages_for(running), spare - pairs
            taken = self._memory.blocks.take(pairs) if min(at_hand, spare) >= 0 else None
            if taken is None:
                break
            running.pairs = taken
            commands += self._pull(candidate, running)
        return commands

    def _homeless(self) -> Iterator[JoinCandidate]:
        """Yield the candidates to take in, in the order in which they would join, without those that join next."""
        if self._policy.handoff is Handoff.DEVICE:
            return
        joins_next = max(1, self._limits.max_batch // STOCK)
        for place, candidate in enumerate(self._candidates.requests):
            is_best_effort = not (candidate.has_pool or candidate.is_rt or candidate.is_pinned)
            is_last = candidate.evicted is None and place >= joins_next
            if is_best_effort and is_last and not self._retirement.is_retiring:
                yield candidate

    @property
    def _num_spare_pages(self) -> int:
        """Return the pages at hand that no prompt on its way here is to have."""
        coming = sum(self._pages_for(running) for running in self._here.transfers.for_pool)
        return self._writing.writer.num_at_hand(SPARE) - coming if self._writing.target is not None else 0

    def _pages_for(self, running: Running) -> int:
        return self._writing.writer.pages_for(running, running.prefix)

    def _pull(self, candidate: JoinCandidate, running: Running) -> list[Command]:
        assert candidate.source is not None, "a prefill worker has its KV"
        self._candidates.take(candidate)
        self._notes.note("joined", candidate.key)  # from now on it is lost with this worker
        name, attempt = candidate.key
        dropped = self._roster.drop(name, attempt - 1)
        transfer = self._here.transfers.begin(candidate, running, candidate.source, is_for_pool=True)
        return [*dropped, transfer.command, transfer.pull]

    @property
    def num_pages(self) -> int:
        """Return the pages that the next prompt to take in would need."""
        candidate = next(self._homeless(), None)
        return 0 if candidate is None else units_for(candidate.entry.num_held, self._limits.page_size)

    def write(self, running: Running) -> list[Command]:
        """Copy a prompt that has come to the pool's pages. Others may have got the pages meanwhile: then it is computed
        anew."""
        if not self._writing.has_pages(running):
            self._queue.put_back(running)
            return []
        self.num_taken_in += 1
        copy = self._writing.write(running)
        self._memory.release(running)  # whatever is written there next is written after the copy
        running.pairs = ()
        return [copy]
