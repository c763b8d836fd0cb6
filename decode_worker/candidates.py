"""The candidate requests of a decode worker: who is to join as soon as there is room, before any batch of the pool.

    Offer (its KV is on a prefill worker) ─▶ candidate ── room: Pull, ReceiveKv ─▶ receiving ── intact ──▶ resident
    Batch, pinned (its KV is in the pool) ─▶ candidate ── room: CopyIn ─▶ joining      └── not ──▶ Decline, or CopyIn
                                                                                         where the pool keeps it too

Pinned requests are taken whatever room there is, and go first, by slack (AlignedServe §3.4, and our pinning); others
only while there is room for all who are here. The worker alone decides who is resident: it has the list, and pulls.
Pairs that are received into stay taken until the transfer has ended, whoever still wants it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from alignedserve.commands import Command, ReceiveKv, Send
from alignedserve.core import Entry
from alignedserve.messages import Attempt, Member, Pull
from alignedserve.running import Running

_MOST_RECEIVED = 1000  # remembered, for a sender that believes that nothing came


@dataclass(eq=False)
class Candidate:
    entry: Entry  # with its pages, where its KV is in the pool
    source: Member | None  # the prefill worker that has its KV; None: the pool has
    is_pinned: bool
    due_at: float  # its next token

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
        self._waiting: list[Candidate] = []  # in the order in which they are to join
        self._receiving: dict[tuple[str, int], Receiving] = {}  # by the source's holder and the number
        self._had: dict[Attempt, None] = {}  # have come
        self._numbers: Counter[str] = Counter()  # source -> its last transfer

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> Candidate | None:
        return self._waiting[0] if self._waiting else None

    @property
    def waiting(self) -> Iterable[Candidate]:
        return self._waiting

    @property
    def attempts(self) -> list[Attempt]:
        return [*(one.key for one in self._waiting), *(one.running.key for one in self._wanted)]

    @property
    def _wanted(self) -> list[Receiving]:
        return [one for one in self._receiving.values() if one.is_wanted]

    @property
    def num_receiving(self) -> int:
        """That take seats."""
        return len(self._wanted)

    @property
    def seats(self) -> list[Running]:
        """All whose pairs are taken."""
        return [one.running for one in self._receiving.values()]

    @property
    def prefixes(self) -> list[int]:
        return [one.running.prefix for one in self._wanted]

    # --- Who is there

    def met(self, peer: Member) -> None:
        self._peers[peer.name] = peer

    def peer(self, name: str) -> Member | None:
        return self._peers.get(name)

    def lost(self, peer: Member) -> list[Attempt]:
        """Of whom the KV went with it. Of those that are being received we hear in any case."""
        self._peers.pop(peer.name, None)
        gone = [one for one in self._waiting if one.source == peer]
        self._waiting = [one for one in self._waiting if one.source != peer]
        return [one.key for one in gone]

    # --- Who waits

    def add(self, candidate: Candidate) -> None:
        self._waiting.append(candidate)
        self._waiting.sort(key=lambda one: (not one.is_pinned, one.due_at if one.is_pinned else 0.0))  # stable

    def take_first(self) -> Candidate:
        return self._waiting.pop(0)

    def in_pool(self, attempt: Attempt, entry: Entry | None, pages: tuple[int, ...]) -> bool:
        """The pool has the KV of this one, or has it too. Whether it waits here, or is being received."""
        for one in self._waiting:
            if one.key == attempt:
                one.entry, one.source = entry or replace(one.entry, pages=pages), None
                return True
        for receiving in self._wanted:
            if receiving.running.key == attempt:
                receiving.pages = pages
                return True
        return False

    def drop(self, request: str, attempt: int) -> list[Attempt]:
        """Those of the request up to this attempt: nobody wants them any more."""
        leaving = [one for one in self._waiting if one.is_of(request, attempt)]
        self._waiting = [one for one in self._waiting if one not in leaving]
        received = [one for one in self._wanted if one.running.is_of(request, attempt)]
        for one in received:
            one.is_wanted = False
        return [*(one.key for one in leaving), *(one.running.key for one in received)]

    def pool_lost(self) -> list[Attempt]:
        """Of whom the KV went with it."""
        gone = [one for one in self._waiting if one.source is None]
        self._waiting = [one for one in self._waiting if one.source is not None]
        for receiving in self._receiving.values():
            receiving.pages = ()
        return [one.key for one in gone]

    # --- Transfers

    def pull(self, running: Running, source: Member) -> Receiving:
        self._numbers[source.holder] += 1
        receiving = Receiving(running, self._numbers[source.holder], source)
        self._receiving[source.holder, receiving.number] = receiving
        return receiving

    def received(self, source: str, number: int, intact: bool) -> Receiving | None:
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
