"""The decode worker's core: fetches batches from the pool and decodes them; colocated, it runs prompts too.

    Batch ───▶ candidate ─▶ joining ───▶ resident ───▶ ended: Release
               (no room)    (pages to      ▲
                             pairs)        │
    Offer ───▶ candidate ─▶ receiving ─────┤  (a request that has to leave becomes a candidate: leaving.py)
    Prefill ─▶ waiting ────▶ prompt ───────┘
               (no room)    (known pages, then its chunks)

Parts hear each event; then the acts of a turn follow, in their order. Stores know which requests are where (requests/),
a memory knows what they may take of the device (memory/), and a scheduler plans their steps
(alignedserve/schedulers/).
"""

from __future__ import annotations

from alignedserve.decode_worker.memory.blocks import SharedBlocks
from alignedserve.decode_worker.memory.hidden import WeighedMemory
from alignedserve.decode_worker.memory.shared import SharedMemory
from alignedserve.decode_worker.parts.making import DecodeCounts, DecodeParts
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Attempt
from alignedserve.worker.parts.core import WorkerCore
from alignedserve.worker.setup import WorkerSetup


class DecodeCore(WorkerCore):
    def __init__(self, setup: WorkerSetup) -> None:
        self.stores = Stores(setup)
        super().__init__(self.stores)
        self._parts = parts = DecodeParts(self.stores)
        self._compose(
            parts=(
                parts.rate,  # before the step's end: what is through then was still waiting
                parts.idle,
                parts.arrivals,
                parts.expectations,
                parts.seats,  # before the step's end: memory that was left until then comes free first
                parts.queue,
                parts.prefixes,
                parts.fetching,
                parts.writing,
                parts.prompt_keeping,
                parts.intake,
                parts.joining,
                parts.receiving,
                parts.prefetching,
                parts.leaving,
                parts.asking,
                parts.step_end,
                parts.owners,
                parts.compression,
                parts.retirement,  # before what it takes is told
                parts.router,
                parts.counting,
                parts.repeats,
                parts.pool,  # last: until then, all parts know which pool was lost
            ),
            turn=(
                parts.leaving.repeat_evictions,
                parts.joining.seat,
                parts.stepping.plan,
                self._keep_answers,
                parts.prompt_keeping.keep,
                parts.ahead.write,
                # Prompts get their seats with a step. Only then the pool is asked to fill the memory that is left; no
                # memory is left where a request had to leave.
                parts.taking_in.take_in,
                parts.asking.ask,
                parts.prefetching.prefetch,
                parts.prefetching.cancel,
                parts.pages.ask,
                parts.compression.compress,
                parts.repeats.set_timer,
                parts.router.report,
                parts.reporting.report,
                parts.counting.tell,
                parts.idle.measure,
                parts.retirement.end,
            ),
        )

    def _keep_answers(self, now: float) -> list[Command]:
        """Copy answers to the pool, behind or beside the step that was planned; then use the memory that comes free."""
        parts, memory = self._parts, self.stores.memory
        if not self.stores.here.kept:
            return []
        num_free, commands = memory.num_free, parts.keeping.keep_answers(now)
        if memory.num_free == num_free:
            return commands
        return [*commands, *parts.joining.seat(now), *parts.stepping.plan(now)]

    # --- What is here

    @property
    def shared(self) -> SharedBlocks | None:
        """Return the block pairs, where two requests may be in one."""
        memory = self.stores.memory
        return memory.slots if isinstance(memory, SharedMemory) else None

    @property
    def hybrid(self) -> WeighedMemory | None:
        """Return the memory, where some requests may be kept as hidden vectors."""
        memory = self.stores.memory
        return memory if isinstance(memory, WeighedMemory) else None

    @property
    def holds(self) -> set[Attempt]:
        """Return the attempts for which the pool keeps pages."""
        return self.stores.holds.attempts

    @property
    def settled(self) -> set[Attempt]:
        """Return the attempts that have ended, and of whose answers the pool will hear."""
        return self._parts.writing.settled()

    @property
    def held(self) -> dict[str, int]:
        """Return what is taken now; nothing when no request is open."""
        stores = self.stores
        held = {
            "requests": len(stores.roster.attempts()),
            "pairs": stores.limits.num_pairs - stores.memory.num_free,
            "pages": len(stores.holds),
            "outputs": stores.owners.outputs.num_kept,
        }
        return {**held, **stores.memory.held}

    @property
    def counts(self) -> DecodeCounts:
        """Return what has happened so far."""
        return self._parts.counts
