"""Make the parts of a decode worker: each with the stores, and with the parts that it works with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.decode_worker.parts.asking import BatchAsks, PageAsks
from alignedserve.decode_worker.parts.ending import StepOutcome
from alignedserve.decode_worker.parts.intake import Intake
from alignedserve.decode_worker.parts.joining import Joining
from alignedserve.decode_worker.parts.keeping import AnswerKeeping, PromptKeeping, WritingAhead
from alignedserve.decode_worker.parts.leaving import Leaving
from alignedserve.decode_worker.parts.preempting import Preempting
from alignedserve.decode_worker.parts.prefetching import Prefetching
from alignedserve.decode_worker.parts.receiving import KvReceiving
from alignedserve.decode_worker.parts.reporting import Reporting
from alignedserve.decode_worker.parts.seats import Fetching, Seats
from alignedserve.decode_worker.parts.stepping import Stepping
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.parts.taking_in import TakingIn
from alignedserve.decode_worker.parts.writing import PageWriting
from alignedserve.decode_worker.requests.lengths import LengthsHere
from alignedserve.protocol.figures import DecodeSteps
from alignedserve.scheduling.promise import Promise
from alignedserve.worker.parts.arrivals import Arrivals, Expectations
from alignedserve.worker.parts.compression import PageCompression
from alignedserve.worker.parts.idle_trials import IdleTrials
from alignedserve.worker.parts.prefixes import Prefixes
from alignedserve.worker.parts.prompt_rate import PromptRate
from alignedserve.worker.parts.repeats import Repeats
from alignedserve.worker.parts.router_link import Counting, RouterLink
from alignedserve.worker.parts.step_end import StepEnd
from alignedserve.worker.step.running import Running


class DecodeParts:
    def __init__(self, stores: Stores) -> None:
        queue = stores.queue
        self.queue, self.owners, self.pool = queue, stores.owners, stores.pool
        self.retirement = stores.retirement
        # Seats and memory of requests, and the ways to leave
        self.fetching = Fetching(stores)
        self.seats, self.writing = Seats(stores, self.fetching), PageWriting(stores)
        self.preempting = Preempting(stores, self.seats, self.writing)
        self.leaving = Leaving(stores, self.preempting)
        # Ways for requests to come
        self.intake, self.prefetching = Intake(stores), Prefetching(stores)
        self.joining = Joining(stores, self.seats, self.preempting)
        self.taking_in = TakingIn(stores, self.writing)
        self.receiving = KvReceiving(stores, self.joining, self.taking_in)
        self.prefixes = Prefixes(stores, queue, stores.holds)
        self.arrivals = Arrivals(stores, self.prefixes.admit)
        self.expectations = Expectations(stores, queue, self._named, self.intake.expect)
        # Steps
        self.stepping = Stepping(stores, self.prefixes, self.fetching, self.joining, self.preempting, self.leaving)
        self.prompt_keeping, self.keeping = PromptKeeping(stores, self.writing), AnswerKeeping(stores, self.writing)
        self.ahead = WritingAhead(stores, self.writing, self.prompt_keeping)
        unfinished, asking = lambda: stores.here.unfinished, lambda: self.prefixes.asking
        self.rate = PromptRate(stores, queue, unfinished, asking, stores.copies_beside)
        self.idle = IdleTrials(stores)
        self.step_end = StepEnd(stores, queue, StepOutcome(stores, self.prompt_keeping, self.keeping))
        # Messages to the pool, the router and owners
        self.asking = BatchAsks(stores, self.joining)
        self.pages = PageAsks(stores, self.writing, self.taking_in, self.prompt_keeping)
        self.compression, self.repeats, self.reporting = PageCompression(stores), Repeats(stores), Reporting(stores)
        lengths = LengthsHere(stores.here, stores.candidates, stores.batch)
        told = self._counted, lambda: lengths.now
        self.counting = Counting(stores, queue, lambda: stores.here.seated, self._coming, *told)
        self._stores, self._steps = stores, stores.step_counts
        self.router = RouterLink(stores, self.rate, self.writing.settled)

    def _named(self, request: str) -> Iterable[Running]:
        """Return the requests of this name that do not wait for a seat, and all that ask the pool for their prefix."""
        return [*self.seats.named(request), *self.prefixes.asking]

    def _coming(self) -> list[Promise]:
        """Return the promises to requests that wait here for something else than a seat as a prompt."""
        here, candidates = self._stores.here, self._stores.candidates
        moving = (*here.fetching.values(), *here.joining.values(), *here.transfers.joining, *self.prefixes.asking)
        return [running.promise for running in moving] + [candidate.promise for candidate in candidates.waiting]

    def _counted(self) -> DecodeSteps:
        """Return what the metrics show of steps and of prefetches."""
        return DecodeSteps(
            tuple(self._steps.by_batches),
            self._steps.spread.tally,
            switches=self.joining.num_switches,
            prefetched=self.receiving.num_prefetched,
            in_vain=self._stores.candidates.num_in_vain,
            held_back=self._steps.num_held_back,
        )

    @property
    def counts(self) -> DecodeCounts:
        """Return what has happened so far."""
        return DecodeCounts(
            preemptions=self._stores.counts.num_preemptions,
            evictions=self._stores.counts.num_evictions,
            evicted_aside=self.leaving.num_evicted_aside,
            switches=self.joining.num_switches,
            prefetched=self.receiving.num_prefetched,
            taken_in=self.taking_in.num_taken_in,
            kept_pages=self.writing.num_kept_pages,
            pages_ahead=self.ahead.num_pages,
            reused_tokens=self.fetching.num_reused_tokens,
            spoiled_pages=self.fetching.num_spoiled_pages,
            decode_steps=sum(self._steps.by_batches),
            mixed_steps=self._steps.by_batches[-1],
            ahead_steps=self.stepping.num_ahead_steps,
        )


@dataclass(frozen=True)
class DecodeCounts:
    """The counts of what has happened on a decode worker so far."""

    preemptions: int  # requests that left for others
    evictions: int  # of them, requests that did not lose their KV
    evicted_aside: int  # of them, requests whose KV went to a prefill worker
    switches: int  # batches of which a member has joined
    prefetched: int  # requests that joined from a prefill worker's device, and had waited in the pool
    taken_in: int  # prompts of a node without a pool that were committed to this one's
    kept_pages: int  # of prompts and answers
    pages_ahead: int  # of requests that were to leave next, written while they ran
    reused_tokens: int  # that were not computed because the pool had their KV
    spoiled_pages: int  # of the pool that were not intact
    decode_steps: int
    mixed_steps: int  # decode steps with members of two batches; guests are of none
    ahead_steps: int  # planned while another ran
