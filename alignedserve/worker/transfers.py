"""The transfers of requests' KV between workers: each is found by its request, or by its number."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from alignedserve.protocol.commands import SendKv
from alignedserve.protocol.messages import Attempt, Member
from alignedserve.worker.step.moves import Departure, JoinCandidate
from alignedserve.worker.step.states import State

if TYPE_CHECKING:
    from alignedserve.worker.requests import Requests  # which has the requests of transfers, too

_MOST_RECEIVED = 1000  # attempts that are remembered, for a sender that believes that KV never arrived


class Transfers:
    def __init__(self, here: Requests) -> None:
        self._here = here
        self._had: dict[Attempt, None] = {}  # the newest attempts that were received at any time
        self._numbers: Counter[str] = Counter()  # holder of a source -> number of the newest transfer
        self._pulled: Counter[str] = Counter()  # holder of a receiver -> number of the newest Pull

    # --- Requests that come

    @property
    def coming(self) -> list[JoinCandidate]:
        """Return the requests with a transfer that writes to their blocks, wanted or not."""
        candidates = [of.candidate for of in self._here.of(State.RECEIVING, State.ABANDONED)]
        return [candidate for candidate in candidates if candidate is not None and candidate.transfer is not None]

    def begin(self, candidate: JoinCandidate, source: Member) -> int:
        """Return the number of a transfer of the candidate's KV; the caller orders to receive it, and pulls it."""
        self._numbers[source.holder] += 1
        number = self._numbers[source.holder]
        candidate.transfer = source.holder, number
        return number

    def find(self, source: str, number: int) -> JoinCandidate:
        """Return what comes from this holder under this number."""
        return next(candidate for candidate in self.coming if candidate.transfer == (source, number))

    def end(self, source: str, number: int, intact: bool) -> JoinCandidate:
        candidate = self.find(source, number)
        candidate.transfer = None
        if intact:
            self._had[candidate.key] = None
            if len(self._had) > _MOST_RECEIVED:
                del self._had[next(iter(self._had))]
        return candidate

    def has_come(self, attempt: Attempt) -> bool:
        """Return whether this attempt was received at any time."""
        return attempt in self._had

    # --- Requests that leave

    @property
    def departures(self) -> list[Departure]:
        """Return the departures of requests that still have blocks, wanted or not."""
        departures = [of.departure for of in self._here.of(State.DEPARTING, State.ABANDONED)]
        return [of for of in departures if of is not None and (of.is_wanted or of.number is not None)]

    @property
    def unpulled(self) -> list[Departure]:
        """Return the wanted departures that the receivers have not pulled yet."""
        return [departure for departure in self.departures if departure.is_wanted and departure.number is None]

    def departure_of(self, attempt: Attempt) -> Departure | None:
        """Return the departure of this attempt, if still wanted."""
        running = self._here.find_attempt(attempt, State.DEPARTING)
        return None if running is None else running.departure

    def pulled_as(self, receiver: str, number: int) -> Departure | None:
        """Return the departure that this holder has pulled under this number."""
        return next((of for of in self.departures if (of.to.holder, of.number) == (receiver, number)), None)

    def is_late(self, receiver: str, number: int) -> bool:
        """Return whether a Pull was repeated, or came after a later Pull: the receiver waits for it no longer."""
        if number <= self._pulled[receiver]:
            return True
        self._pulled[receiver] = number
        return False

    def send(self, receiver: str, number: int, attempt: Attempt) -> SendKv:
        """Return the order to send what this holder pulls; nothing is sent of what has gone on, or is under way."""
        departure = self.departure_of(attempt)
        if departure is None or departure.number is not None or departure.to.holder != receiver:
            return SendKv(number, receiver, (), ())
        departure.number, running = number, departure.running
        return SendKv(number, receiver, running.blocks, running.kept_tokens)
