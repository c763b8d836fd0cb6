"""Offers of requests to other workers, which pull the KV: for good, or until there is room here again.

    here ── Offer ──▶ departing ── Pull: SendKv ──▶ sent ──▶ gone
      ▲                 │   ▲             └── failed ──┐
      │                 │   └───── Offer again ────────┘
      └── Decline, or the other worker is lost

A departing request is in no step, and keeps its blocks until nothing reads them any more, wanted or not.
"""

from __future__ import annotations

from collections import Counter, deque

from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, SendKv
from alignedserve.protocol.events import KvSent, MemberLost, Received
from alignedserve.protocol.messages import Attempt, Decline, Member, Pull, holder
from alignedserve.scheduling.policy import Handoff
from alignedserve.worker.owners import Outputs
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.step.request import Departure, WorkerRequest
from alignedserve.worker.step.states import State

MOST_BROKEN, BROKEN_S = 3, 60.0  # transfers that fail in this time: then KV goes another way, if possible
_MOST_SENT = 1000  # remembered, for a receiver that says later that nothing came


class Offering(WorkerPart):
    """Offers requests to other workers, which go on with the requests, and removes what these workers have pulled."""

    def __init__(self, worker: Worker, outputs: Outputs) -> None:
        super().__init__(worker)
        self._outputs = outputs
        self.came_back_from = ""  # the worker that a request did not go to in the end
        self._sent: dict[Attempt, None] = {}  # that are with other workers
        self._asks_again = False
        self._pulled: Counter[str] = Counter()  # holder of a receiver -> number of the newest Pull
        self._broken_at: dict[str, deque[float]] = {}  # worker -> the last times when KV did not come there

    def reached(self, running: WorkerRequest, now: float) -> Member | None:
        """Return the worker that the request is to go on to, if KV can go there directly."""
        failed = self._broken_at.get(running.decode, ())  # each failure costs a request a time-out
        is_broken = len(failed) == MOST_BROKEN and now - failed[0] < BROKEN_S
        by_pool = (is_broken and self._pool.member is not None) or self._policy.handoff is Handoff.POOL
        return self._candidates.peers.get(running.decode) if running.kv.can_move and not by_pool else None

    def offer(self, running: WorkerRequest, to: Member, waits_there: bool = False) -> Command:
        """Offer the request to that worker; until the worker answers, the request is in no step."""
        self._decisions.note(Kind.OFFERED, running.request, to.name)
        return self.begin(Departure(running, to, waits_there=waits_there))

    def begin(self, departure: Departure) -> Command:
        """Let a request depart."""
        departure.running.leaves_by(departure)
        self._here.move(departure.running, State.DEPARTING)
        return departure.ask

    def departure_of(self, attempt: Attempt) -> Departure | None:
        """Return the departure of this attempt, if still wanted."""
        running = self._here.find_attempt(attempt, State.DEPARTING)
        return None if running is None else running.departure

    def declined(self, message: Decline, frame: Received, now: float) -> None:
        """Let an offered request go on here. A request that has gone, and whose KV has not arrived, is lost."""
        attempt = message.request, message.attempt
        if message.is_failed:
            self._broken_at.setdefault(frame.sender, deque(maxlen=MOST_BROKEN)).append(now)
        departure = self.departure_of(attempt)
        if departure is not None:
            self.stays(departure)
        elif message.is_failed and attempt in self._sent:
            self._notes.note("lost", attempt)  # no worker has the request: the owner is to start the next attempt

    def stays(self, departure: Departure) -> None:
        """Let a request go on here as soon as no transfer reads its blocks."""
        if departure.number is not None:
            departure.is_declined = True
            return
        running = departure.running
        self._here.move(running, State.RESIDENT)
        running.goes_anywhere()
        self.came_back_from = departure.to.name
        if departure.goes_on_there:
            self._notes.note("joined", running.key)  # the other worker may have claimed the request
        self._decisions.note(Kind.JOINED, running.request, "", len(running.output), len(self._here.residents))

    # --- What other workers pull

    def pulled(self, pull: Pull, frame: Received, now: float) -> list[Command]:
        """Send the KV that another worker pulls; send nothing where the request has gone on."""
        receiver = holder(frame.sender, frame.incarnation)
        if self.is_late(receiver, pull.number):
            return []
        return [self.send(receiver, pull.number, (pull.request, pull.attempt))]

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

    def sent(self, event: KvSent, now: float) -> list[Command]:
        """End the transfer of an offered request. Where the transfer failed, offer the request again: the answer says
        whether the request has arrived, since two workers must not go on with the same request."""
        departure = self.pulled_as(event.to, event.number)
        if departure is None:
            return []
        self._counts.num_failed_transfers += not event.ok
        if not departure.is_wanted:
            self.remove(departure)
            return []
        departure.number = None
        if departure.is_declined or self._candidates.peers.get(departure.to.name) != departure.to:
            self.stays(departure)
            return []
        if not event.ok:
            return [departure.ask]
        running = departure.running
        self._sent[running.key] = None
        if len(self._sent) > _MOST_SENT:
            del self._sent[next(iter(self._sent))]
        self._outputs.forget([running.request.id])  # that worker has the whole output
        self.remove(departure)
        return self._holds.release(running.key, departure.to.name)

    def pulled_as(self, receiver: str, number: int) -> Departure | None:
        """Return the departure that this holder has pulled under this number."""
        return next((of for of in self._here.departures if (of.to.holder, of.number) == (receiver, number)), None)

    def remove(self, departure: Departure) -> None:
        """Free the blocks of a request that is here no more."""
        self._here.move(departure.running, State.GONE)
        self._memory.give(departure.running.blocks)

    def peer_lost(self, event: MemberLost, now: float) -> list[Command]:
        """A worker is lost: requests offered to that worker go on here. The first one that had to be answered at once
        is given up: that request may have killed the worker, and would kill the next. Running transfers still report
        their end."""
        self._broken_at.pop(event.member.name, None)
        lost = [departure for departure in self._unpulled if departure.to == event.member]
        first = next((departure for departure in lost if departure.goes_on_there and not departure.waits_there), None)
        for departure in lost:
            if departure is not first:
                self.stays(departure)
        if first is None:
            return []
        running = first.running
        self._notes.note("cut", running.key)  # the owner counts this attempt as a possible cause of the worker's end
        self._outputs.forget([running.request.id])
        self.remove(first)
        return self._holds.release(running.key)

    # --- Requests that depart

    def drop(self, running: WorkerRequest) -> None:
        """Forget a departing request as soon as no transfer reads its blocks."""
        departure = running.departure
        assert departure is not None, "the request departs"
        if not departure.goes_on_there:
            self._candidates.unwanted.append((departure.to.name, running.key))
        if departure.number is None:
            self.remove(departure)
        else:
            self._here.move(running, State.ABANDONED)

    @property
    def _unpulled(self) -> list[Departure]:
        """Return the wanted departures that the receivers have not pulled yet."""
        return [departure for departure in self._here.departures if departure.is_wanted and departure.number is None]

    def ask_again(self) -> None:
        self._asks_again = True

    def ask_pending(self, now: float) -> list[Command]:
        """Repeat the offers of requests that were not pulled: the offer or its answer may be lost."""
        again, self._asks_again = self._asks_again, False
        return [departure.ask for departure in self._unpulled] if again else []

    def repeat(self, to: str) -> list[Command]:
        return [departure.ask for departure in self._unpulled if departure.to.name == to]

    @property
    def awaits_answer(self) -> bool:
        return bool(self._here.departures)
