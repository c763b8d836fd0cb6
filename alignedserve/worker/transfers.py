"""Transfers of requests' KV between workers: those that come here, and those that leave.

While pages or KV are copied to blocks, nothing else is written to these blocks: their request is in no step, and keeps
the blocks until the copy has ended, wanted or not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from alignedserve.core import Entry
from alignedserve.protocol.commands import Command, Send, SendKv
from alignedserve.protocol.messages import Attempt, Member, Offer, Pull
from alignedserve.worker.candidates import JoinCandidate
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State

_MOST_RECEIVED = 1000  # attempts that are remembered, for a sender that believes that KV never arrived


@dataclass(eq=False)
class IncomingTransfer:
    """A request with KV on the way here."""

    running: WorkerRequest
    number: int
    source: Member
    candidate: JoinCandidate  # the request's candidate
    pages: tuple[int, ...]  # of the pool, where the pool has the KV too

    @property
    def is_wanted(self) -> bool:
        return self.running.state is State.RECEIVING

    @property
    def pull(self) -> Command:
        return Send(self.source.name, Pull(self.number, *self.running.key))


class IncomingTransfers(dict[tuple[str, int], IncomingTransfer]):
    """The transfers that write to blocks, wanted or not: (holder of the source, number) -> transfer."""

    def __init__(self) -> None:
        super().__init__()
        self._had: dict[Attempt, None] = {}  # the newest attempts that were received at any time
        self._numbers: Counter[str] = Counter()  # holder of a source -> number of the newest transfer

    def begin(self, candidate: JoinCandidate, running: WorkerRequest, source: Member) -> IncomingTransfer:
        """Number a transfer of the candidate's KV; the caller orders to receive the KV, and pulls it."""
        self._numbers[source.holder] += 1
        number = self._numbers[source.holder]
        transfer = IncomingTransfer(running, number, source, candidate, candidate.entry.pages)
        self[source.holder, number] = transfer
        return transfer

    def end(self, source: str, number: int, intact: bool) -> IncomingTransfer:
        transfer = self.pop((source, number))
        if intact:
            self._had[transfer.running.key] = None
            if len(self._had) > _MOST_RECEIVED:
                del self._had[next(iter(self._had))]
        return transfer

    def has_come(self, attempt: Attempt) -> bool:
        """Return whether this attempt was received at any time."""
        return attempt in self._had

    def has_pages(self, attempt: Attempt, pages: tuple[int, ...]) -> None:
        """Note the pool's pages of this attempt if the attempt is being received."""
        for transfer in self.values():
            if transfer.is_wanted and transfer.running.key == attempt:
                transfer.pages = pages

    def pool_lost(self) -> None:
        for transfer in self.values():
            transfer.pages = ()


@dataclass(eq=False)
class Departure:
    """A request that is to leave with its KV for another worker, and to go on there."""

    goes_on_there = True  # else the request comes back

    running: WorkerRequest  # with blocks
    to: Member
    number: int | None = None  # of the transfer, once pulled
    waits_there: bool = False  # for room, perhaps long: there is no other way, and no decline
    is_declined: bool = False  # by that worker, while a transfer still reads the blocks

    @property
    def entry(self) -> Entry:
        return self.running.entry((), self.running.names)

    @property
    def ask(self) -> Command:
        """Ask the other worker to pull the KV."""
        return Send(self.to.name, Offer(self.entry, not self.waits_there))

    @property
    def is_wanted(self) -> bool:
        return self.running.state is State.DEPARTING


class Departures(list[Departure]):
    """The departures of requests that still have blocks, wanted or not."""

    def __init__(self) -> None:
        super().__init__()
        self._pulled: Counter[str] = Counter()  # holder of a receiver -> number of the newest Pull

    @property
    def wanted(self) -> list[Departure]:
        return [departure for departure in self if departure.is_wanted]

    @property
    def unpulled(self) -> list[Departure]:
        """Return the wanted departures that the receivers have not pulled yet."""
        return [departure for departure in self if departure.is_wanted and departure.number is None]

    def find(self, attempt: Attempt) -> Departure | None:
        """Return the departure of this attempt, if still wanted."""
        return next((departure for departure in self.wanted if departure.running.key == attempt), None)

    def pulled_as(self, receiver: str, number: int) -> Departure | None:
        """Return the departure that this holder has pulled under this number."""
        found = (departure for departure in self if (departure.to.holder, departure.number) == (receiver, number))
        return next(found, None)

    def is_late(self, receiver: str, number: int) -> bool:
        """Return whether a Pull was repeated, or came after a later Pull: the receiver waits for it no longer."""
        if number <= self._pulled[receiver]:
            return True
        self._pulled[receiver] = number
        return False

    def send(self, receiver: str, number: int, attempt: Attempt) -> SendKv:
        """Return the order to send what this holder pulls; nothing is sent of what has gone on, or is under way."""
        departure = self.find(attempt)
        if departure is None or departure.number is not None or departure.to.holder != receiver:
            return SendKv(number, receiver, (), ())
        departure.number, running = number, departure.running
        return SendKv(number, receiver, running.blocks, running.kept_tokens)
