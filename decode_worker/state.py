"""The decode worker's core: fetches batches from the pool and decodes them; colocated, it runs prompts too.

    Batch ───▶ candidate ─▶ joining ───▶ resident ───▶ ended: Release
               (no room)    (pages to      ▲
                             pairs)        │
    Offer ───▶ candidate ─▶ receiving ─────┤  (a request that has to leave becomes a candidate: leaving.py)
    Prefill ─▶ waiting ────▶ prompt ───────┘
               (no room)    (its chunks)

Parts hear each event; then the acts of a turn follow, in their order. Stores know which requests are where (requests/),
a memory knows what they may take of the device (memory/), and a packing knows which of them run (packing/).
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.decode_worker.memory.blocks import SharedBlocks
from alignedserve.decode_worker.memory.hidden import HiddenMemory
from alignedserve.decode_worker.memory.shared import SharedMemory
from alignedserve.decode_worker.parts.asking import Asking, AskingForPages
from alignedserve.decode_worker.parts.ending import Ending
from alignedserve.decode_worker.parts.intake import Intake
from alignedserve.decode_worker.parts.joining import Joining
from alignedserve.decode_worker.parts.keeping import Keeping
from alignedserve.decode_worker.parts.leaving import Leaving
from alignedserve.decode_worker.parts.preempting import Preempting
from alignedserve.decode_worker.parts.prefetching import Prefetching
from alignedserve.decode_worker.parts.receiving import Receiving
from alignedserve.decode_worker.parts.reporting import Reporting
from alignedserve.decode_worker.parts.seats import Seats
from alignedserve.decode_worker.parts.stepping import Stepping
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.parts.taking_in import TakingIn
from alignedserve.decode_worker.parts.writing import PageWriting
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Attempt, Expect
from alignedserve.worker.parts.arrivals import Arrivals, Expectations
from alignedserve.worker.parts.composed import WorkerCore
from alignedserve.worker.parts.compression import PageCompression
from alignedserve.worker.parts.repeats import Repeats
from alignedserve.worker.parts.router_link import RouterLink
from alignedserve.worker.parts.step_end import StepEnd
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.running import Running


class DecodeCore(WorkerCore):
    def __init__(self, setup: WorkerSetup) -> None:
        self.stores = stores = Stores(setup)
        super().__init__(stores)
        self._seats, self._writing = seats, writing = Seats(stores), PageWriting(stores)
        self._preempting = preempting = Preempting(stores, seats, writing)
        self._joining = joining = Joining(stores, seats, preempting)
        self._leaving = leaving = Leaving(stores, preempting)
        self._taking_in = taking_in = TakingIn(stores, writing)
        self._receiving = receiving = Receiving(stores, joining, taking_in)
        self._keeping = keeping = Keeping(stores, writing)
        self._stepping = stepping = Stepping(stores, joining, preempting, leaving)
        prefetching, asking, intake = Prefetching(stores), Asking(stores, joining), Intake(stores)
        pages, reporting = AskingForPages(stores, writing, taking_in), Reporting(stores)
        compression, repeats = PageCompression(stores), Repeats(stores)
        router = RouterLink(stores, stores.queue, stores.here.prompts.values, writing.settled)
        self._compose(
            parts=(
                Arrivals(stores, self._admit),
                Expectations(stores, stores.queue, self._named, self._expect_candidate),
                seats,  # before the end of a step, which may free what seats were left with
                stores.queue,
                writing,
                intake,
                joining,
                receiving,
                prefetching,
                leaving,
                asking,
                StepEnd(stores, stores.queue, Ending(stores, keeping)),
                stores.owners,
                compression,
                router,
                repeats,
                stores.retirement,
                stores.pool,
            ),
            turn=(
                leaving.repeat_evictions,
                self._seat,
                stepping.plan,
                self._keep_answers,
                # Prompts get their seats with a step: what is left then is the pool's, and nothing is where a request
                # had to leave.
                taking_in.take_in,
                asking.ask,
                prefetching.prefetch,
                prefetching.cancel,
                pages.ask,
                compression.compress,
                repeats.set_timer,
                router.report,
                reporting.report,
                stores.retirement.end,
            ),
        )

    # --- Acts that join parts

    def _seat(self, now: float) -> list[Command]:
        """Seat candidates, which have waited already, before prompts."""
        commands = self._joining.seat_candidates(now)
        if self._joining.next_candidate(now) is None:
            self._seats.seat_prompts(now)
        return commands

    def _keep_answers(self, now: float) -> list[Command]:
        """Copy answers to the pool behind the step that was planned; then use the memory that comes free."""
        if not self.stores.here.kept:
            return []
        return [*self._keeping.keep_answers(now), *self._seat(now), *self._stepping.plan(now)]

    # --- What common parts ask for

    def _admit(self, prompt: Running, now: float) -> list[Command]:
        self.stores.queue.admit(prompt, now)
        return []

    def _named(self, _request: str) -> list[Running]:
        """Return the requests that are here and do not wait, of this name or another."""
        return self.stores.roster.occupants()

    def _expect_candidate(self, told: Expect, now: float) -> list[Command]:
        self.stores.candidates.expect(told, self.stores.policy, now)
        return []

    # --- What is here

    @property
    def shared(self) -> SharedBlocks | None:
        """Return the block pairs, where two requests may be in one."""
        memory = self.stores.memory
        return memory.slots if isinstance(memory, SharedMemory) else None

    @property
    def hybrid(self) -> HiddenMemory | None:
        """Return the memory, where some requests may be kept as hidden vectors."""
        memory = self.stores.memory
        return memory if isinstance(memory, HiddenMemory) else None

    @property
    def attempts(self) -> list[Attempt]:
        """Return all attempts that are here."""
        return self.stores.roster.attempts()

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
        return held | stores.memory.held

    @property
    def counts(self) -> DecodeCounts:
        return DecodeCounts(
            self._preempting.num_preemptions,
            self._preempting.num_evictions,
            self._leaving.num_evicted_aside,
            self._joining.num_switches,
            self._receiving.num_prefetched,
            self._taking_in.num_taken_in,
            self._writing.num_kept_pages,
            self._stepping.num_decode_steps,
            self._stepping.num_mixed_steps,
            self._stepping.num_ahead_steps,
        )


@dataclass(frozen=True)
class DecodeCounts:
    """What has happened on a decode worker so far."""

    preemptions: int  # requests that left for others
    evictions: int  # of them, requests that did not lose their KV
    evicted_aside: int  # of them, requests whose KV went to a prefill worker
    switches: int  # batches of which a member has joined
    prefetched: int  # requests that joined from a prefill worker's device, and had waited in the pool
    taken_in: int  # prompts of a node without a pool that were committed to this one's
    kept_pages: int  # of answers
    decode_steps: int
    mixed_steps: int  # decode steps with members of two batches; guests are of none
    ahead_steps: int  # planned while another ran
