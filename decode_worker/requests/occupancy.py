"""The requests on a decode worker: the states of all (worker/requests.py), candidates and their order, transfers,
departures.

While pages or KV are copied to blocks, nothing else is written to them: their request is in no step, and keeps the
blocks until the copy has ended, wanted or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from alignedserve.core import Chunk
from alignedserve.decode_worker.requests.candidates import CandidateLists, JoinCandidate, RunningBatch
from alignedserve.protocol.commands import Command, ReceiveKv, Send
from alignedserve.protocol.messages import Attempt, Member, Pull
from alignedserve.scheduling.levels import InLine, expected_waits, level_of
from alignedserve.scheduling.promise import tokens_left
from alignedserve.scheduling.slo import Rank, Standing, Work
from alignedserve.worker.arriving import PromptQueue
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.offering import Departures
from alignedserve.worker.pace import Pace
from alignedserve.worker.requests import PRESENT, Requests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State

# Until the blocks of a request that leaves are free: Evict, Pull, and the end of the transfer each wait for a step.
AHEAD_STEPS = 4
_MOST_RECEIVED = 1000  # attempts that are remembered, for a sender that believes that its KV never arrived


@dataclass(eq=False)
class IncomingTransfer:
    """A request whose KV is on its way here."""

    running: WorkerRequest
    number: int
    source: Member
    pages: tuple[int, ...] = ()  # of the pool, where the pool has its KV too
    is_prefetched: bool = False
    was_evicted: bool = False

    @property
    def is_wanted(self) -> bool:
        return self.running.state is State.RECEIVING

    @property
    def command(self) -> ReceiveKv:
        running = self.running
        return ReceiveKv(self.number, self.source.holder, running.blocks, running.kept_tokens)

    @property
    def pull(self) -> Command:
        return Send(self.source.name, Pull(self.number, *self.running.key))


class IncomingTransfers:
    def __init__(self) -> None:
        self._transfers: dict[tuple[str, int], IncomingTransfer] = {}  # (holder of the source, number) -> transfer
        self._had: dict[Attempt, None] = {}  # attempts that were received at any time, the newest ones
        self._numbers: Counter[str] = Counter()  # holder of a source -> number of its newest transfer

    @property
    def wanted(self) -> list[IncomingTransfer]:
        return [transfer for transfer in self._transfers.values() if transfer.is_wanted]

    @property
    def occupants(self) -> list[WorkerRequest]:
        """Return every request whose blocks are written to, wanted or not."""
        return [transfer.running for transfer in self._transfers.values()]

    @property
    def joining(self) -> list[WorkerRequest]:
        """Return the requests that have a seat here once they have come."""
        return [transfer.running for transfer in self.wanted]

    def begin(self, candidate: JoinCandidate, running: WorkerRequest, source: Member) -> IncomingTransfer:
        """Number a transfer of the candidate's KV; the caller orders `command` and `pull`."""
        self._numbers[source.holder] += 1
        transfer = IncomingTransfer(running, self._numbers[source.holder], source)
        transfer.pages, transfer.was_evicted = candidate.entry.pages, candidate.evicted is not None
        transfer.is_prefetched = candidate.partner is not None and not transfer.was_evicted
        self._transfers[source.holder, transfer.number] = transfer
        return transfer

    def end(self, source: str, number: int, intact: bool) -> IncomingTransfer:
        transfer = self._transfers.pop((source, number), None)
        assert transfer is not None, "a transfer ended that was not begun"
        if intact:
            self._had[transfer.running.key] = None
            if len(self._had) > _MOST_RECEIVED:
                del self._had[next(iter(self._had))]
        return transfer

    def has_come(self, attempt: Attempt) -> bool:
        """Return whether this attempt was received at any time."""
        return attempt in self._had

    def is_under_way(self, source: str, attempt: Attempt) -> bool:
        """Return whether this attempt is being received from this member, wanted or not."""
        return any(
            transfer.running.key == attempt and transfer.source.name == source for transfer in self._transfers.values()
        )

    def has_pages(self, attempt: Attempt, pages: tuple[int, ...]) -> None:
        """Note the pool's pages of this attempt if it is being received."""
        for transfer in self.wanted:
            if transfer.running.key == attempt:
                transfer.pages = pages

    def pool_lost(self) -> None:
        for transfer in self._transfers.values():
            transfer.pages = ()

    def pull_again(self, source: Member | None) -> list[Command]:
        """Repeat the Pulls to this member, since the first ones may have been lost."""
        return [transfer.pull for transfer in self._transfers.values() if transfer.source == source]


class Occupancy(Requests):
    """The requests on a decode worker, with what belongs to some states: candidates, transfers, departures."""

    queue: PromptQueue  # prompts that wait for a seat

    def __init__(self) -> None:
        super().__init__()
        self.candidates, self.batch = CandidateLists(), RunningBatch()
        self.transfers, self.departures = IncomingTransfers(), Departures()
        self._short_at = 0  # how many were seated when a request last left for lack of memory; 0: forgotten

    def attempts(self) -> list[Attempt]:
        """Return all attempts that are here: candidates are only entries until they join."""
        before = PRESENT.index(State.RECEIVING)
        candidates = [candidate.key for candidate in self.candidates.waiting]
        here, on_their_way = self.of(*PRESENT[:before]), self.of(*PRESENT[before:])
        return [*(running.key for running in here), *candidates, *(running.key for running in on_their_way)]

    def occupants(self) -> list[WorkerRequest]:
        seated = self.of(State.RESIDENT, State.PROMPT, State.JOINING, State.FETCHING, State.KEPT)
        return [*seated, *self.transfers.occupants, *(departure.running for departure in self.departures)]

    def running_of(self, chunk: Chunk) -> WorkerRequest:
        """Return the request of this chunk."""
        running = self.find(chunk.request)
        assert running is not None, "a chunk was chosen of a request that is not here"
        return running

    @property
    def seated(self) -> list[WorkerRequest]:
        """Return the requests that may be in a step."""
        return [*self.residents.values(), *self.prompts.values()]

    @property
    def best_effort(self) -> list[WorkerRequest]:
        """Return the best-effort requests that may be in a step, and so can leave."""
        return [running for running in self.seated if not running.promise.is_rt]

    @property
    def num_seated(self) -> int:
        """Return how many requests have a seat; a departing one may have to stay."""
        seated = len(self.residents) + len(self.prompts) + self.num_joining + self.num_fetching
        return seated + len(self.transfers.joining) + len(self.departures)

    @property
    def num_joining(self) -> int:
        return len(self.among(State.JOINING))

    @property
    def num_fetching(self) -> int:
        return len(self.among(State.FETCHING))

    @property
    def with_kv(self) -> list[WorkerRequest]:
        """Return the requests that decode here, or are about to."""
        return [*self.of(State.RESIDENT, State.JOINING), *self.transfers.joining]

    @property
    def kept(self) -> Collection[WorkerRequest]:
        """Return the requests that have ended, and whose answers are copied to the pool."""
        return self.among(State.KEPT)

    @property
    def abandoned(self) -> list[WorkerRequest]:
        """Return the unwanted requests whose blocks pages are still being copied to."""
        return [running for running in self.copies.values() if running.state is State.ABANDONED]

    @property
    def is_changing(self) -> bool:
        """Return whether some request has blocks and is on its way here, or leaves them."""
        return bool(self.copies or self.transfers.occupants or self.departures)

    def blocks_needed(self, steps: int, block_size: int) -> int:
        """Return the blocks that decodes need to go on for this many steps."""
        return sum(
            running.num_held + steps > len(running.kv.blocks) * block_size
            for running in self.residents.values()
            if not running.kv.form
        )

    # --- A shortage of memory

    def note_shortage(self) -> None:
        """Note that a request leaves for lack of memory: none is asked for before another one has ended."""
        self._short_at = self.num_seated

    @property
    def had_shortage(self) -> bool:
        """Return whether a request has left for lack of memory, and that is not forgotten yet."""
        return self._short_at > 0

    @property
    def is_short(self) -> bool:
        """Return whether as many requests are seated as when one left for lack of memory."""
        return 0 < self._short_at <= self.num_seated

    def forget_shortage(self) -> None:
        """Forget the shortage once fewer requests are seated."""
        if not self.is_short:
            self._short_at = 0


class CandidateOrder:
    """The order in which candidates join, and how long each has to wait."""

    def __init__(self, pace: Pace, here: Occupancy, steps: StepsInFlight) -> None:
        self.pace, self.policy, self._steps = pace, pace.policy, steps
        self._here, self._candidates = here, here.candidates

    def arrange(self, now: float) -> None:
        """Sort the candidates once a step; by arrival, they are sorted as they come."""
        candidates = self._candidates
        if candidates.arranged_in == self._steps.number or self.policy.ordering.is_by_arrival:
            return
        candidates.arranged_in = self._steps.number
        if len(candidates.requests) > 1:
            candidates.arrange(lambda requests: self._as_they_join(requests, now))

    def _as_they_join(self, requests: Sequence[JoinCandidate], now: float) -> Sequence[JoinCandidate]:
        times, policy = self.pace.times, self.policy

        def standing_of(candidate: JoinCandidate) -> Standing:
            return self._standing(candidate, now)

        return list(policy.ordering.line(requests, standing_of, times, policy.late))

    def _standing(self, candidate: JoinCandidate, now: float) -> Standing:
        """Return the standing of a candidate that is a copy and a decode away from its next token."""
        work = Work(transfer_s=candidate.entry.num_held * self.pace.copy_token_s)
        return candidate.promise.standing(now, work, self.pace.times)

    def is_urgent(self, candidate: JoinCandidate, now: float) -> bool:
        """Return whether the candidate is real-time and its slack has run out."""
        return self._standing(candidate, now).rank(self.pace.times, self.policy.late) is Rank.URGENT_RT

    def tokens_left(self, candidate: JoinCandidate) -> int:
        """Return how many more tokens of output are expected."""
        return tokens_left(candidate.entry.request, self.policy, len(candidate.entry.output))

    def expected_waits(self, now: float) -> dict[Attempt, float]:
        """Return how long each candidate waits (ALISE §3.2) if those before it join first and as many run as now."""

        def in_line(candidate: JoinCandidate) -> InLine:
            tokens = self.tokens_left(candidate)
            level = None if candidate.is_rt else level_of(tokens)
            return InLine(tokens * self.pace.times.mean_s, now - candidate.since, level)

        waiting = list(self._candidates.waiting)
        waits = expected_waits(map(in_line, waiting), max(1, self._here.num_seated), self.policy.age_s)
        return dict(zip((candidate.key for candidate in waiting), waits, strict=True))
