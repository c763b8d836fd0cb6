"""The prefill worker's core: runs prompts, emits their first tokens, commits their KV to the pool.

    Prefill ─▶ asking ──▶ waiting ──▶ fetching ──▶ running ──▶ ended (one token was enough)
               (what the  (no pairs)  (known pages    ├──▶ candidate ── Pull ──▶ gone (offering.py)
               pool knows)            to pairs)       │       └── Decline ─┐
                                                      └──▶ committing ◀────┴─▶ copying ──▶ Commit
                                                           (no pages)          (pairs to pages)

A request that is cancelled, or whose next attempt arrives, leaves from wherever it is. The pairs and pages of a
request that is being copied stay taken until the copy has ended. Pages that no prompt waits for go back to the pool:
another worker may be waiting for them.

A real-time prompt runs at once, and asks for its pages when it is through. A best-effort one is seated when the pages
for all its KV are leased: while the arena has none for its class, it waits without a place on the device. Should they
be gone when it is through (the pool was lost, or took back what it held of the prompt), it waits where it is, but gives
its place to a real-time prompt that lacks room, and is computed anew. Where there is no pool it needs no pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from alignedserve.core import ServiceClass
from alignedserve.prefill_worker.buffering import Buffers
from alignedserve.prefill_worker.candidates import Candidates
from alignedserve.prefill_worker.committing import Commits
from alignedserve.prefill_worker.decode_peers import DecodePeers
from alignedserve.prefill_worker.known_pages import KnownPages
from alignedserve.prefill_worker.next_step import NextStep
from alignedserve.prefill_worker.offering import Offers
from alignedserve.prefill_worker.pool_writing import PoolWriting
from alignedserve.prefill_worker.running_prompts import RunningPrompts
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Expect
from alignedserve.scheduling.promise import Promise
from alignedserve.worker.parts.arrivals import Arrivals, Expectations
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.compression import PageCompression
from alignedserve.worker.parts.core import WorkerCore
from alignedserve.worker.parts.idle_trials import IdleTrials
from alignedserve.worker.parts.prefixes import Prefixes
from alignedserve.worker.parts.prompt_rate import PromptRate
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.parts.repeats import Repeats
from alignedserve.worker.parts.router_link import Counting, RouterLink
from alignedserve.worker.parts.step_end import StepEnd
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.running import Running


class PrefillCore(WorkerCore):
    def __init__(self, setup: WorkerSetup) -> None:
        common = Common(setup)
        super().__init__(common)
        candidates, copy_numbers, known = Candidates(), count(1), KnownPages(common.pool, common.notes)
        queue = PromptQueue(common, known.leave)
        prefixes = Prefixes(common, queue)
        commits = Commits(common, candidates, known)
        offers = Offers(common, candidates, commits, known)
        prompts = RunningPrompts(common, queue, prefixes, offers, known, copy_numbers)
        writing = PoolWriting(common, queue, candidates, commits, offers, prompts, known)
        buffers = Buffers(common, queue, candidates, copy_numbers)
        step = NextStep(common, queue, prefixes, prompts, commits, offers, buffers, writing)
        rate = PromptRate(common, queue, lambda: prompts.seated, lambda: prefixes.asking)
        compression, repeats = PageCompression(common), Repeats(common)
        router, idle = RouterLink(common, rate), IdleTrials(common)
        counting = Counting(common, queue, lambda: prompts.running, self._coming)
        self._prefixes, self._prompts, self._buffers = prefixes, prompts, buffers
        self._compose(
            parts=(
                rate,  # before the step's end: what is through then was still waiting
                idle,
                Arrivals(common, prefixes.admit),
                Expectations(common, queue, self._named, self._pass_on),
                StepEnd(common, queue, prompts),
                prompts,
                queue,
                prefixes,
                commits,
                offers,
                writing,
                buffers,
                DecodePeers(candidates, offers, buffers, setup.direct),
                common.owners,
                compression,
                router,
                counting,
                repeats,
                common.retirement,
                common.pool,
            ),
            turn=(
                step.make_place,
                offers.offer_again,
                buffers.announce_again,
                offers.offer_all,
                writing.write,
                step.begin,
                writing.ask_for_chats,
                compression.compress,
                repeats.set_timer,
                router.report,
                counting.tell,
                idle.measure,
                common.retirement.end,
            ),
        )

    def _named(self, _request: str) -> Iterable[Running]:
        """Return all requests that are here and do not wait for room, whatever their names are."""
        return [*self._common.roster.occupants(), *self._prefixes.asking]

    def _coming(self) -> list[Promise]:
        """Return the promises to prompts that ask the pool for their beginning, or fetch it."""
        return [running.promise for running in (*self._prefixes.asking, *self._prompts.fetching)]

    def _pass_on(self, told: Expect, _now: float) -> list[Command]:
        """Tell the pool of a request that has gone on."""
        return self._common.pool.send(told)

    @property
    def pairs(self) -> list[int]:
        return [*super().pairs, *self._buffers.pairs]

    @property
    def held(self) -> dict[str, int]:
        """Return what is taken now; nothing when no request is open."""
        common = self._common
        return {
            "requests": len(common.roster.attempts()),
            "pairs": common.limits.num_pairs - common.memory.num_free,
            "outputs": common.owners.outputs.num_kept,
            "written parts": common.writer.num_with_parts,
            "buffers": len(self._buffers),
        }

    def leased_for(self, service: ServiceClass) -> tuple[int, ...]:
        """Return the pages that are leased to this worker for requests of one class."""
        return self._common.writer.leased_for(service)

    @property
    def num_preemptions(self) -> int:
        return self._common.counts.num_preemptions

    @property
    def num_reused_tokens(self) -> int:
        """Return how many tokens were not computed because the pool had their KV."""
        return self._prompts.num_reused_tokens

    @property
    def num_spoiled_pages(self) -> int:
        """Return how many pages of the pool were not intact."""
        return self._prompts.num_spoiled_pages

    @property
    def num_buffered_pairs(self) -> int:
        """Return how many pairs hold KV for decode workers."""
        return self._buffers.num_pairs

    @property
    def most_buffered_pairs(self) -> int:
        return self._buffers.most_pairs

    @property
    def num_prefetched(self) -> int:
        """Return how many requests were prefetched from the pool for decode workers."""
        return self._buffers.num_prefetched
