"""Who is to join a decode worker as soon as there is room: its candidate requests, then its candidate batch.

    Offer (its KV is on a prefill worker) ─▶ candidate ── room: Pull, ReceiveKv ─▶ receiving ── intact ──▶ resident
    Batch (its KV is in the pool) ─────────▶ candidate ── room: CopyIn ─▶ joining      └── not ──▶ Decline, or CopyIn
                                                                                         where the pool keeps it too

The order in which they join (AlignedServe §3.4, and our pinning):

    1. pinned requests, by slack: they are taken whatever room there is
    2. other candidate requests: they are about as long as those that run, and belong to their batch, or have run here
       and had to leave (evicting.py). Who has least to wait comes first (ALISE §3.2); first come, first served, as they
       came
    3. the candidate batch, as the pool has it: the first member that joins begins a batch switch

Real-time members of the candidate batch overtake best-effort candidate requests. A batch that has waited for half of
the time that its most urgent member had overtakes all that are not pinned: one that is always filled up would never
end. The worker alone decides who is resident: it has the lists, and pulls. Pairs that are received into stay taken
until the transfer has ended, whoever still wants it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from alignedserve.core import Entry, units_for
from alignedserve.protocol.commands import Command, ReceiveKv, Send
from alignedserve.protocol.messages import Attempt, Expect, Member, Pull
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.promise import Promise
from alignedserve.worker.step.running import Running

_MOST_RECEIVED = 1000  # remembered, for a sender that believes that nothing came


@dataclass(eq=False)
class Candidate:
    entry: Entry  # with its pages, where its KV is in the pool
    source: Member | None  # the prefill worker that has its KV; None: the pool has
    is_pinned: bool
    promise: Promise
    due_at: float  # its next token
    since: float
    batch: int = 0  # its tag, of a member of the candidate batch; 0 of a candidate request
    found_for: int = 0  # the batch that ran, and was as long as it, when the pool found it
    partner: Member | None = None  # who is to prefetch it, or has: then that is its source, too
    is_refused: bool = False  # there was no room for it
    has_pool: bool = True  # the node where its KV lies; else it waits on a prefill worker's device alone
    evicted: Running | None = None  # it had to leave: its KV is at its source alone, all else is here

    @property
    def is_rt(self) -> bool:
        return self.promise.is_rt

    @property
    def key(self) -> Attempt:
        return self.entry.request.id, self.entry.request.attempt

    def is_of(self, request: str, attempt: int) -> bool:
        return self.entry.request.id == request and self.entry.request.attempt <= attempt


@dataclass(eq=False)
class Receiving:
    running: Running
    number: int
    source: Member
    is_wanted: bool = True
    pages: tuple[int, ...] = ()  # where the pool keeps it too
    is_prefetched: bool = False
    was_evicted: bool = False
    is_for_pool: bool = False  # it has no seat, and goes on to the pool's pages (taking_in.py)

    @property
    def command(self) -> ReceiveKv:
        running = self.running
        return ReceiveKv(self.number, self.source.holder, running.pairs, running.tokens(0, running.prefix))

    @property
    def pull(self) -> Command:
        return Send(self.source.name, Pull(self.number, *self.running.key))


class Candidates:
    def __init__(self) -> None:
        self._peers: dict[str, Member] = {}  # prefill workers that can send KV here
        self._requests: list[Candidate] = []  # in the order in which they are to join
        self._batch: list[Candidate] = []  # members of the candidate batch, likewise
        self._receiving: dict[tuple[str, int], Receiving] = {}  # by the source's holder and the number
        self._had: dict[Attempt, None] = {}  # have come
        self._numbers: Counter[str] = Counter()  # source -> its last transfer
        self._in_vain: list[tuple[str, Attempt]] = []  # prefetched, and not to be pulled; their partners do not know

    def __len__(self) -> int:
        return len(self._requests) + len(self._batch)

    def first(self, now: float) -> Candidate | None:
        """Who joins next."""
        request, member = next(iter(self._requests), None), next(iter(self._batch), None)
        if request is None or member is None:
            return request or member
        overtakes = (member.is_rt and not request.is_rt) or self.is_starving(now)
        return member if overtakes and not request.is_pinned else request

    @property
    def num_in_batch(self) -> int:
        return len(self._batch)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Sequence[Candidate]:
        """In the order in which they are to join."""
        return self._requests

    @property
    def have_rt(self) -> bool:
        return any(one.is_rt for one in self.waiting)

    def is_starving(self, now: float) -> bool:
        """Whether the candidate batch has waited for half of the time that its most urgent member had."""
        first = min(self._batch, key=lambda one: one.due_at, default=None)
        return first is not None and now - first.since > (first.due_at - first.since) / 2

    @property
    def waiting(self) -> Iterable[Candidate]:
        return (*self._requests, *self._batch)

    @property
    def attempts(self) -> list[Attempt]:
        return [*(one.key for one in self.waiting), *(one.running.key for one in self._wanted)]

    @property
    def _wanted(self) -> list[Receiving]:
        return [one for one in self._receiving.values() if one.is_wanted]

    @property
    def num_receiving(self) -> int:
        """That take seats."""
        return len(self.received)

    @property
    def seats(self) -> list[Running]:
        """All whose pairs are taken."""
        return [one.running for one in self._receiving.values()]

    @property
    def received(self) -> list[Running]:
        """Who joins."""
        return [one.running for one in self._wanted if not one.is_for_pool]

    @property
    def for_pool(self) -> list[Running]:
        return [one.running for one in self._wanted if one.is_for_pool]

    # --- Who is there

    def met(self, peer: Member) -> None:
        self._peers[peer.name] = peer

    def peer(self, name: str) -> Member | None:
        return self._peers.get(name)

    def lost(self, peer: Member) -> list[Attempt]:
        """Of whom the KV went with it. Of those that are being received we hear in any case."""
        self._peers.pop(peer.name, None)
        return self._leave(lambda one: one.source == peer)

    # --- Who waits

    def add(self, candidate: Candidate) -> None:
        if candidate.batch:
            self._batch.append(candidate)
            return
        self._requests.append(candidate)
        self._requests.sort(key=lambda one: (not one.is_pinned, one.due_at if one.is_pinned else 0.0))  # stable

    def arrange(self, as_they_join: Callable[[Sequence[Candidate]], Sequence[Candidate]]) -> None:
        """Those that are not pinned."""
        pinned = sum(one.is_pinned for one in self._requests)
        self._requests[pinned:] = as_they_join(self._requests[pinned:])

    def take(self, candidate: Candidate) -> None:
        """It joins."""
        self._not_pulled([candidate] if candidate.source is None else [])
        (self._batch if candidate.batch else self._requests).remove(candidate)

    def expect(self, told: Expect, policy: Policy, now: float) -> None:
        for one in self.waiting:
            if one.key == (told.request, told.attempt):
                one.entry = replace(one.entry, request=replace(one.entry.request, estimate=told.estimate))
                if one.evicted is None:
                    one.promise.expect(one.entry.request, policy, now)
                else:
                    one.evicted.expect(told.estimate, policy, now)

    def in_pool(self, attempt: Attempt, entry: Entry | None, pages: tuple[int, ...]) -> bool:
        """The pool has the KV of this one, or has it too. Whether it waits here, or is being received."""
        for one in self.waiting:
            if one.key == attempt:
                if one.evicted is None:  # else it has more by now than these pages hold
                    one.entry = entry or replace(one.entry, pages=pages)
                    one.source = None if one.partner is None else one.source
                return True
        for receiving in self._wanted:
            if receiving.running.key == attempt:
                receiving.pages = pages
                return True
        return False

    def drop(self, request: str, attempt: int) -> list[Attempt]:
        """Those of the request up to this attempt: nobody wants them any more."""
        leaving = self._leave(lambda one: one.is_of(request, attempt))
        received = [one for one in self._wanted if one.running.is_of(request, attempt)]
        for one in received:
            one.is_wanted = False
        return [*leaving, *(one.running.key for one in received)]

    def pool_lost(self) -> list[Attempt]:
        """Of whom the KV went with it."""
        for receiving in self._receiving.values():
            receiving.pages = ()
        for one in self.waiting:
            one.entry = replace(one.entry, pages=())
        return self._leave(lambda one: one.source is None)

    def _leave(self, leaves: Callable[[Candidate], bool]) -> list[Attempt]:
        leaving = [one for one in self.waiting if leaves(one)]
        gone = [one.key for one in leaving]
        if gone:
            self._not_pulled(leaving)
            self._requests = [one for one in self._requests if not leaves(one)]
            self._batch = [one for one in self._batch if not leaves(one)]
        return gone

    # --- Who had to leave

    @property
    def evicted(self) -> list[Running]:
        return [one.evicted for one in self._requests if one.evicted is not None]

    def take_evicted(self, source: str, attempts: Iterable[Attempt] | None = None) -> list[Running]:
        """Those of these, or all, whose KV was there: it is there no longer."""
        named = None if attempts is None else set(attempts)
        gone = [
            one
            for one in self._requests
            if one.evicted is not None
            and one.source is not None
            and one.source.name == source
            and (named is None or one.key in named)
        ]
        self._requests = [one for one in self._requests if one not in gone]
        return [one.evicted for one in gone if one.evicted is not None]

    # --- What is prefetched

    @property
    def peers(self) -> list[Member]:
        return list(self._peers.values())

    @property
    def without_buffer(self) -> list[Candidate]:
        """Whose KV is only in the pool, and might be elsewhere."""
        return [one for one in self.waiting if one.source is None and one.partner is None and not one.is_refused]

    @property
    def num_buffered(self) -> int:
        return sum(one.source is not None for one in self.waiting)

    def prefetched_pairs(self, block_size: int) -> Counter[str]:
        """Of all that wait here and are prefetched, or are to be, by partner."""
        pairs: Counter[str] = Counter()
        for one in self.waiting:
            if one.partner is not None:
                pairs[one.partner.name] += units_for(one.entry.prefix, block_size)
        return pairs

    def can_be_pulled(self, partner: str, attempt: Attempt) -> bool:
        """It has come there. Whether anybody waits for it here, or receives it."""
        for one in self.waiting:
            if one.key == attempt and one.partner is not None and one.partner == self._peers.get(partner):
                one.source = one.partner
                return True
        return any(one.running.key == attempt and one.source.name == partner for one in self._receiving.values())

    def let_go(self, partner: str, attempt: Attempt) -> None:
        for one in self.waiting:
            if one.key == attempt and one.partner is not None and one.partner.name == partner:
                one.source, one.partner, one.is_refused = None, None, True

    def buffers_lost(self, peer: Member) -> None:
        """What the pool has of them is there still."""
        for one in self.waiting:
            if one.partner == peer and one.entry.pages:
                one.source = one.partner = None

    def not_wanted(self, partner: str, attempt: Attempt) -> None:
        """What it has, or was to have, of it."""
        self._in_vain.append((partner, attempt))

    def _not_pulled(self, some: Iterable[Candidate]) -> None:
        self._in_vain += [(one.partner.name, one.key) for one in some if one.partner is not None]

    def take_in_vain(self) -> list[tuple[str, Attempt]]:
        in_vain, self._in_vain = self._in_vain, []
        return in_vain

    # --- Transfers

    def pull(self, candidate: Candidate, running: Running, source: Member, is_for_pool: bool = False) -> Receiving:
        self._numbers[source.holder] += 1
        receiving = Receiving(running, self._numbers[source.holder], source, is_for_pool=is_for_pool)
        receiving.pages, receiving.was_evicted = candidate.entry.pages, candidate.evicted is not None
        receiving.is_prefetched = candidate.partner is not None and not receiving.was_evicted
        self._receiving[source.holder, receiving.number] = receiving
        return receiving

    def ended(self, source: str, number: int, intact: bool) -> Receiving | None:
        receiving = self._receiving.pop((source, number), None)
        if receiving is not None and intact:
            self._had[receiving.running.key] = None
            if len(self._had) > _MOST_RECEIVED:
                del self._had[next(iter(self._had))]
        return receiving

    def has_come(self, attempt: Attempt) -> bool:
        """Whatever has become of it since."""
        return attempt in self._had

    def pull_again(self, name: str) -> list[Command]:
        """Of this member: what was said may have been lost."""
        return [one.pull for one in self._receiving.values() if one.source == self._peers.get(name)]
