"""What a decode worker does with its candidates (candidates.py): takes them, pulls their KV, seats them.

It has their KV fetched from the pool ahead of need, by a prefill worker:

    waits here ── Prefetch ──▶ (copied beside prompts) ── Prefetched ──▶ pulled when it joins
        └── room before that, or LetGo: it joins from the pool, as it would without

What is prefetched is only a copy: nothing waits for it, and a prefill worker that dies loses nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from alignedserve.core import Entry, Role, units_for
from alignedserve.decode_worker.candidates import Candidate, Candidates
from alignedserve.decode_worker.seats import SeatsCore
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, KvReceived, MemberJoined, MemberLost, Received
from alignedserve.protocol.messages import (
    Attempt,
    Cancel,
    Decline,
    Kept,
    LetGo,
    Member,
    Offer,
    Prefetch,
    Prefetched,
    Release,
)
from alignedserve.scheduling.expected_wait import InLine, expected_waits, shortest_wait_first
from alignedserve.scheduling.levels import level_of
from alignedserve.scheduling.policy import Order, Room
from alignedserve.scheduling.promise import tokens_left
from alignedserve.scheduling.slo import Rank, Standing, Work, by_standing
from alignedserve.worker.core import WorkerSetup, key
from alignedserve.worker.step.running import Running

_WEIGHT = 0.1  # of the newest join in the mean


class PullingCore(SeatsCore):
    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self._candidates, self._direct = Candidates(), setup.direct
        self._arranged_at = -1  # the step in which the candidate requests were put in order
        self._mean_join_s = 0.0  # from a batch's arrival until a member joins
        self.num_switches = 0  # batches of which a member has joined
        self.num_prefetched = 0  # joined from a prefill worker's device, and had waited in the pool

    @property
    def _num_seated(self) -> int:
        return super()._num_seated + self._candidates.num_receiving

    @property
    def _is_arriving(self) -> bool:
        return super()._is_arriving or bool(self._candidates.seats)

    def _seats(self) -> list[Running]:
        return [*super()._seats(), *self._candidates.seats]

    @abstractmethod
    def _running_from(self, entry: Entry) -> Running:
        """Without pairs."""

    @abstractmethod
    def _came_for_pool(self, running: Running) -> list[Command]:
        """From a node without a pool, and it has no seat."""

    @abstractmethod
    def _join(self, entry: Entry, running: Running) -> list[Command]:
        """From the pool."""

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(sender, Offer() as offer):
                return self._offered(sender, offer)
            case Received(pool, Kept() as kept):
                return self._kept_too(pool, kept)
            case Received(sender, Prefetched(attempts)):
                return self._prefetched(sender, attempts)
            case Received(sender, LetGo(attempts)):
                for attempt in attempts:
                    self._candidates.let_go(sender, attempt)
                return []
            case KvReceived(number, source, intact):
                return self._received(source, number, intact)
            case MemberJoined(member) if member.role is Role.PREFILL:
                if self._direct and member.transport:
                    self._candidates.met(member)
                return []
            case MemberLost(member) if member.role is Role.PREFILL:
                self._candidates.buffers_lost(member)
                for attempt in self._candidates.lost(member):
                    self._notes.moved("lost", attempt)
                return []
        return super()._happened(event)

    def _offered(self, sender: str, offer: Offer) -> list[Command]:
        """The sender says so until it is pulled, or has an answer. What is not to be declined waits its turn there."""
        entry = offer.entry
        source, (name, attempt) = self._candidates.peer(sender), key(entry.request)
        here = max((known for request, known in self._held_attempts() if request == name), default=-1)
        if here >= attempt or self._candidates.has_come((name, attempt)):
            is_asked = (name, attempt) in self._candidates.attempts
            return [] if is_asked else [Send(sender, Cancel(name, attempt))]  # it has nothing to send any more
        if (
            source is None
            or self._is_retiring
            or not (offer.is_pinned or not offer.has_pool or self._has_room_beyond(entry))
        ):
            return [Send(sender, Decline(name, attempt))]
        self._add_candidate(entry, source, offer.is_pinned, has_pool=offer.has_pool)
        return []

    def _add_candidate(
        self,
        entry: Entry,
        source: Member | None,
        is_pinned: bool,
        batch: int = 0,
        has_pool: bool = True,
        found_for: int = 0,
    ) -> None:
        promise, now = self._running_of(entry.request, entry.output, entry.due).promise, self._now
        promise.served(now)  # it waits from now on
        due_at = promise.due_at(now)
        candidate = Candidate(entry, source, is_pinned, promise, due_at, now, batch, found_for, has_pool=has_pool)
        self._candidates.add(candidate)
        self._arranged_at = -1

    def _has_room_beyond(self, entry: Entry) -> bool:
        """For this one and all that wait here already."""
        if self._waiting or self._crowded_at or self._num_seated + len(self._candidates) >= self._limits.max_batch:
            return False
        entries = (entry, *(one.entry for one in self._candidates.waiting))
        tokens = [one.request.most_tokens if self._policy.room is Room.WHOLE else one.prefix + 1 for one in entries]
        return sum([units_for(each, self._limits.block_size) for each in tokens]) <= self._blocks.num_free

    def _seat_candidates(self) -> list[Command]:
        """Nobody overtakes the first."""
        self._arrange_candidates()
        commands: list[Command] = []
        while (first := self._first_candidate) is not None:
            running = first.evicted or self._running_from(first.entry)
            room = self._room_for(running)
            if self._cannot_wait(first):
                commands += self._yield_to(room)
            if not self._has_seat(running) or not self._seat(running, room):
                break
            self._candidates.take(first)
            self._joins(first, running)
            if first.source is None:
                commands += self._join(first.entry, running)
                continue
            name, attempt = first.key
            commands += self._drop(name, attempt - 1)
            receiving = self._candidates.pull(first, running, first.source)
            if first.evicted is None:
                self._notes.moved("joined", first.key)  # from now on it is lost with us
            commands += [receiving.command, receiving.pull]
        return commands

    def _cannot_wait(self, candidate: Candidate) -> bool:
        """For memory that comes free by itself: it was pinned for that, or its slack has run out since."""
        if not (candidate.is_rt and self._policy.packs):
            return False
        return (
            candidate.is_pinned or self._standing(candidate).rank(self._recent.now, self._policy.late) is Rank.URGENT_RT
        )

    def _arrange_candidates(self) -> None:
        """By how long they have to wait (ALISE §3.2), once a step; where who comes first is served first, they are."""
        if self._arranged_at == self._steps.number or self._policy.order is Order.FCFS:
            return
        self._arranged_at = self._steps.number
        if self._candidates.num_requests > 1:
            self._candidates.arrange(self._as_they_join)

    def _as_they_join(self, some: Sequence[Candidate]) -> Sequence[Candidate]:
        times = self._recent.now
        line = by_standing(some, self._standing, times, self._policy.late)
        return shortest_wait_first(line, self._in_line, max(1, self._num_seated), self._policy.age_s)

    def _standing(self, candidate: Candidate) -> Standing:
        """A copy and a decode away from its next token."""
        work = Work(tokens=candidate.promise.tokens_due, transfer_s=candidate.entry.prefix * self._copy_token_s)
        return candidate.promise.standing(self._now, work, self._recent.now)

    def _in_line(self, candidate: Candidate) -> InLine:
        tokens = self._tokens_left(candidate.entry)
        level = None if candidate.is_rt else level_of(tokens)
        return InLine(tokens * self._recent.now.mean_s, self._now - candidate.since, level)

    def _tokens_left(self, entry: Entry) -> int:
        return tokens_left(entry.request, self._policy, len(entry.output))

    @property
    def _first_candidate(self) -> Candidate | None:
        """Who has run here and is recomputed comes before best-effort ones that have not. Who had to leave joins again
        when somebody else has ended, else the two would take turns."""
        first = self._candidates.first(self._now)
        if first is not None and first.evicted is not None and 0 < self._crowded_at <= self._num_seated:
            return None
        return None if first is None or (self._waiting and not (first.is_pinned or first.is_rt)) else first

    @property
    def _here(self) -> list[Running]:
        """Who has KV on the device, or is about to."""
        return [*self._residents.values(), *self._joining.values(), *self._candidates.received]

    def _joins(self, candidate: Candidate, running: Running) -> None:
        """Candidate requests of its band are of the batch that runs; the first member of the next one begins a batch
        switch."""
        is_found = 0 < candidate.found_for == self._batch.number
        running.batch = candidate.batch or (self._batch.number if is_found else self._tag(running.prefix))
        if candidate.batch:
            if candidate.batch != self._batch.number:
                self.num_switches += 1
                self._batch.begins(candidate.batch)
            self._mean_join_s += _WEIGHT * (self._now - candidate.since - self._mean_join_s)

    def _tag(self, prefix: int) -> int:
        return self._batch.tag(prefix, self._here)

    def _received(self, source: str, number: int, intact: bool) -> list[Command]:
        one = self._candidates.ended(source, number, intact)
        assert one is not None, "a transfer ended that was not begun"
        self._is_stuck = False
        running, attempt = one.running, one.running.key
        if not intact:
            self.num_failed_transfers += 1
        if one.is_wanted and intact and one.is_for_pool:
            return self._came_for_pool(running)
        if one.is_wanted and intact:
            self.num_prefetched += one.is_prefetched
            self._residents[attempt[0]] = running
            return []
        failed = [] if intact else [self._figures]
        if one.is_wanted and one.was_evicted:
            self._put_back(running)
            return failed
        if one.is_wanted and one.pages and self._pool is not None:
            return [*failed, *self._copy_in(running, one.pages)]
        self._vacate(running)
        if not one.is_wanted:
            return failed
        if one.is_prefetched or self._candidates.peer(one.source.name) != one.source:
            self._notes.moved("lost", attempt)
            return failed
        self._notes.moved("returned", attempt)
        return [*failed, Send(one.source.name, Decline(*attempt, is_failed=True))]

    def _kept_too(self, pool: str, kept: Kept) -> list[Command]:
        """The pool has a copy of what came from a prefill worker: what it lacks is all that is written from now on."""
        attempt = (kept.request, kept.attempt)
        is_here = attempt in self._held_attempts()  # and not only its pairs, until what comes has come
        having = (*self._seats(), *self._candidates.evicted)
        running = next((one for one in having if is_here and one.key == attempt), None)
        is_candidate = self._candidates.in_pool(attempt, None, kept.pages)
        if running is None and not is_candidate:
            return [Send(pool, Release(*attempt))]
        self._from_pool[kept.request] = attempt
        if running is not None:
            full = len(running.request.tokens) // self._limits.page_size  # of the prompt, as it was handed on
            running.known, running.names = kept.pages[:full], kept.names[:full] or running.names
        return []

    # --- Ahead of need

    def _prefetch(self) -> list[Command]:
        """Those that could not join at once, in the order in which they will: as many as there may be room for."""
        pool = self._pool
        peers = [] if pool is None else [one for one in self._candidates.peers if one.node == pool.node]
        if not peers or not self._policy.prefetch:
            return []
        used = self._candidates.prefetched_pairs(self._limits.block_size)
        most = self._most_ahead
        wanted: dict[str, list[Candidate]] = {}
        for one in self._candidates.without_buffer:
            pairs = units_for(one.entry.prefix, self._limits.block_size)
            peer = min(peers, key=lambda peer: (used[peer.name], peer.name))
            if used[peer.name] + pairs > most:
                break
            used[peer.name] += pairs
            one.partner = peer
            wanted.setdefault(peer.name, []).append(one)
        if not wanted:
            return []
        waits = self._expected_waits()
        return [
            Send(name, Prefetch(tuple(one.entry for one in some), tuple(waits[one.key] for one in some)))
            for name, some in wanted.items()
        ]

    @property
    def _most_ahead(self) -> int:
        """Pairs that a prefill worker gives us, as far as we know."""
        return int(self._policy.candidate_share * self._limits.num_pairs)

    def _expected_waits(self) -> dict[Attempt, float]:
        """ALISE §3.2, where those before it join first and as many run as now."""
        waiting = list(self._candidates.waiting)
        waits = expected_waits(map(self._in_line, waiting), max(1, self._num_seated), self._policy.age_s)
        return dict(zip((one.key for one in waiting), waits, strict=True))

    def _prefetched(self, sender: str, attempts: Iterable[Attempt]) -> list[Command]:
        """What nobody waits for any more is told so: an earlier word may have been lost."""
        unwanted = [one for one in attempts if not self._candidates.can_be_pulled(sender, one)]
        return [Send(sender, Cancel(*attempt)) for attempt in unwanted]

    def _cancel_buffers(self) -> list[Command]:
        """Of who has joined from the pool, or is not wanted any more."""
        return [Send(name, Cancel(*attempt)) for name, attempt in self._candidates.take_in_vain()]

    # --- What is here

    def _say_again(self, to: str) -> list[Command]:
        return [*super()._say_again(to), *self._candidates.pull_again(to)]
