"""Requests whose KV lies here until a decode worker pulls it: they are handed on without waiting for the pool.

    through ── Offer ──▶ offered ── Pull ──▶ sending ── sent ──▶ gone
                            │  └── Decline      └── failed, and Decline ──▶ to the pool, as if never offered
                            ├── no memory for prompts, but written ────────▶ to the pool: a Commit, no copy
                            └── the decode worker is lost ─────────────────▶ to the pool

Beside that its KV is written to the pool, if pages are free at once; no request waits for it. Before the Pull that
makes the way to the pool short; after it the pool keeps the pages for the decode worker (Commit, is_there), which then
writes only what comes later.

Pairs stay taken as long as a transfer or a copy reads them, whatever has become of the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from alignedserve.protocol.commands import SendKv
from alignedserve.protocol.messages import Attempt, Member
from alignedserve.worker.page_writer import Copy
from alignedserve.worker.step.running import Running

_MOST_SENT = 1000  # remembered, for a receiver that says later that nothing came


@dataclass(eq=False)
class Candidate:
    running: Running
    decode: Member  # the decode worker that it is offered to
    is_pinned: bool
    is_here: bool = True  # and wanted; otherwise only its pairs are still taken
    transfer: tuple[str, int] | None = None  # that reads its pairs: holder of the receiver, number
    was_pulled: bool = False
    is_declined: bool = False  # while a transfer reads its pairs
    copy: Copy | None = None  # to the pool, under way or written
    is_kept: bool = False  # the pool has been told of the copy
    has_asked: bool = False  # for pages

    @property
    def key(self) -> Attempt:
        return self.running.key

    @property
    def is_over(self) -> bool:
        """Return whether it is not wanted here, and nothing reads its pairs any more."""
        return not self.is_here and self.transfer is None and self.copy is None

    @property
    def written(self) -> Copy | None:
        return self.copy if self.copy is not None and self.copy.is_written else None


class Candidates:
    def __init__(self) -> None:
        self._peers: dict[str, Member] = {}  # decode workers that KV can be sent to
        self._all: list[Candidate] = []
        self._last: Counter[str] = Counter()  # receiver -> the number of its last Pull
        self._sent: dict[Attempt, None] = {}

    def __iter__(self) -> Iterator[Candidate]:
        return iter(list(self._all))

    @property
    def here(self) -> list[Candidate]:
        return [candidate for candidate in self._all if candidate.is_here]

    @property
    def seats(self) -> list[Running]:
        """Return the requests whose pairs are taken, but for those that a copy to the pool names too."""
        return [candidate.running for candidate in self._all if candidate.copy is None]

    def meet(self, peer: Member) -> None:
        self._peers[peer.name] = peer

    def peer(self, name: str) -> Member | None:
        return self._peers.get(name)

    @property
    def has_peers(self) -> bool:
        return bool(self._peers)

    def has_peer_on(self, node: str) -> bool:
        return any(peer.node == node for peer in self._peers.values())

    def any_peer(self, before: str = "") -> Member | None:
        """Return the decode worker to which least is offered, if any; `before` only where there is no other."""
        offered = Counter(candidate.decode.name for candidate in self.here)
        peers = self._peers.values()
        return min(peers, key=lambda peer: (peer.name == before, offered[peer.name], peer.name), default=None)

    def lose(self, peer: Member) -> list[Candidate]:
        """Forget a decode worker that is lost, and return what was offered to it."""
        self._peers.pop(peer.name, None)
        return [candidate for candidate in self.here if candidate.decode == peer]

    def add(self, running: Running, decode: Member, is_pinned: bool) -> Candidate:
        candidate = Candidate(running, decode, is_pinned)
        self._all.append(candidate)
        return candidate

    def remove(self, candidate: Candidate) -> None:
        self._all.remove(candidate)

    def find(self, attempt: Attempt) -> Candidate | None:
        return next((candidate for candidate in self._all if candidate.is_here and candidate.key == attempt), None)

    def find_copied(self, running: Running) -> Candidate | None:
        """Return the candidate of this request that is being copied to the pool."""
        same = (candidate for candidate in self._all if candidate.running is running)
        return next((candidate for candidate in same if candidate.copy is not None), None)

    # --- Transfers

    def is_late(self, receiver: str, number: int) -> bool:
        """Return whether a Pull was repeated, or came after a later one: its receiver waits for it no longer."""
        if number <= self._last[receiver]:
            return True
        self._last[receiver] = number
        return False

    def send(self, candidate: Candidate | None, receiver: str, number: int) -> SendKv:
        """Return the command to send a candidate; it sends nothing where that is gone, or under way already."""
        if candidate is None or candidate.transfer is not None:
            return SendKv(number, receiver, (), ())
        candidate.transfer, candidate.was_pulled = (receiver, number), True
        running = candidate.running
        return SendKv(number, receiver, running.pairs, running.kept_tokens)

    def end_transfer(self, receiver: str, number: int) -> Candidate | None:
        """Return the candidate whose pairs were sent; None where there were none to send."""
        transfer = (receiver, number)
        found = next((candidate for candidate in self._all if candidate.transfer == transfer), None)
        if found is not None:
            found.transfer = None
        return found

    def let_go(self, candidate: Candidate) -> None:
        """Note that a candidate is with its decode worker, as far as this worker can tell."""
        candidate.is_here = False
        self._sent[candidate.key] = None
        if len(self._sent) > _MOST_SENT:
            del self._sent[next(iter(self._sent))]

    def was_sent(self, attempt: Attempt) -> bool:
        return attempt in self._sent
