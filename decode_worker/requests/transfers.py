"""Transfers of KV from prefill workers to this one.

Pairs that a transfer writes to stay taken until the transfer has ended, whether its request is still wanted or not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from alignedserve.decode_worker.requests.candidates import JoinCandidate
from alignedserve.protocol.commands import Command, ReceiveKv, Send
from alignedserve.protocol.messages import Attempt, Member, Pull
from alignedserve.worker.step.running import Running

_MOST_RECEIVED = 1000  # attempts that are remembered, for a sender that believes that its KV never arrived


@dataclass(eq=False)
class IncomingTransfer:
    """A request whose KV is on its way here."""

    running: Running
    number: int
    source: Member
    is_wanted: bool = True
    pages: tuple[int, ...] = ()  # of the pool, where the pool has its KV too
    is_prefetched: bool = False
    was_evicted: bool = False
    is_for_pool: bool = False  # it has no seat, and goes on to the pool's pages (taking_in.py)

    @property
    def command(self) -> ReceiveKv:
        running = self.running
        return ReceiveKv(self.number, self.source.holder, running.pairs, running.kept_tokens)

    @property
    def pull(self) -> Command:
        return Send(self.source.name, Pull(self.number, *self.running.key))


class IncomingTransfers:
    def __init__(self) -> None:
        self._transfers: dict[tuple[str, int], IncomingTransfer] = {}  # (holder of the source, number) -> transfer
        self._had: dict[Attempt, None] = {}  # attempts that have come, whatever has become of them since
        self._numbers: Counter[str] = Counter()  # holder of a source -> number of its newest transfer

    @property
    def wanted(self) -> list[IncomingTransfer]:
        return [transfer for transfer in self._transfers.values() if transfer.is_wanted]

    @property
    def occupants(self) -> list[Running]:
        """Return every request whose pairs are written to, wanted or not."""
        return [transfer.running for transfer in self._transfers.values()]

    @property
    def joining(self) -> list[Running]:
        """Return the requests that have a seat here once they have come."""
        return [transfer.running for transfer in self.wanted if not transfer.is_for_pool]

    @property
    def for_pool(self) -> list[Running]:
        """Return the requests that go on to the pool once they have come."""
        return [transfer.running for transfer in self.wanted if transfer.is_for_pool]

    def begin(
        self, candidate: JoinCandidate, running: Running, source: Member, is_for_pool: bool = False
    ) -> IncomingTransfer:
        """Number a transfer of the candidate's KV; the caller orders `command` and `pull`."""
        self._numbers[source.holder] += 1
        transfer = IncomingTransfer(running, self._numbers[source.holder], source, is_for_pool=is_for_pool)
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
        """Return whether this attempt was received, whatever has become of it since."""
        return attempt in self._had

    def is_under_way(self, source: str, attempt: Attempt) -> bool:
        """Return whether this attempt is being received from this member, wanted or not."""
        return any(
            transfer.running.key == attempt and transfer.source.name == source for transfer in self._transfers.values()
        )

    def has_pages(self, attempt: Attempt, pages: tuple[int, ...]) -> bool:
        """Note the pool's pages of this attempt, and return whether it is being received."""
        for transfer in self.wanted:
            if transfer.running.key == attempt:
                transfer.pages = pages
                return True
        return False

    def drop(self, request: str, attempt: int) -> list[Attempt]:
        """Mark the request up to this attempt as not wanted; return the attempts that were."""
        dropped = [transfer for transfer in self.wanted if transfer.running.is_of(request, attempt)]
        for transfer in dropped:
            transfer.is_wanted = False
        return [transfer.running.key for transfer in dropped]

    def pool_lost(self) -> None:
        for transfer in self._transfers.values():
            transfer.pages = ()

    def pull_again(self, source: Member | None) -> list[Command]:
        """Ask this member again for what it is to send: the first Pull may have been lost."""
        return [transfer.pull for transfer in self._transfers.values() if transfer.source == source]
