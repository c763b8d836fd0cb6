"""Requests whose KV goes directly to another worker, which pulls it: for good, or until there is room here again.

    here ── Offer ──▶ departing ── Pull: SendKv ──▶ sent ──▶ gone
      ▲                 │   ▲             └── failed ──┐
      │                 │   └───── Offer again ────────┘
      └── Decline, or the other worker is lost

A request is in no step while it departs, and keeps its blocks until nothing reads them any more, wanted or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, Send, SendKv
from alignedserve.protocol.events import Received
from alignedserve.protocol.messages import Attempt, Decline, Evict, Member, Offer
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.log import WorkerLog
from alignedserve.worker.owners import Outputs
from alignedserve.worker.part import CorePart
from alignedserve.worker.requests import Requests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State

_MOST_SENT = 1000  # remembered, for a receiver that says later that nothing came


@dataclass(eq=False)
class Departure:
    """A request whose KV is to leave for another worker: for good where it is offered, or until there is room again."""

    running: WorkerRequest  # with its blocks
    to: Member
    wait_s: float = 0.0  # until it is back, as was expected
    number: int | None = None  # of the transfer, once it is pulled
    is_offered: bool = False  # it goes on at that worker
    waits_there: bool = False  # for room, which may be long: it has no other way, and is not declined
    is_declined: bool = False  # that worker goes on without it, while a transfer still reads its blocks

    @property
    def is_wanted(self) -> bool:
        return self.running.state is State.DEPARTING

    @property
    def is_unpulled(self) -> bool:
        """Return whether it is wanted and its receiver has not pulled it yet."""
        return self.is_wanted and self.number is None


class Departures:
    def __init__(self) -> None:
        self._departures: list[Departure] = []
        self._pulled: Counter[str] = Counter()  # holder of a receiver -> the number of its newest Pull

    def __iter__(self) -> Iterator[Departure]:
        return iter(self._departures)

    def __len__(self) -> int:
        return len(self._departures)

    def add(self, departure: Departure) -> None:
        self._departures.append(departure)

    def remove(self, departure: Departure) -> None:
        self._departures.remove(departure)

    @property
    def wanted(self) -> list[Departure]:
        return [departure for departure in self._departures if departure.is_wanted]

    @property
    def unpulled(self) -> list[Departure]:
        return [departure for departure in self._departures if departure.is_unpulled]

    def find(self, attempt: Attempt) -> Departure | None:
        """Return the departure of this attempt, if it is wanted."""
        return next((departure for departure in self.wanted if departure.running.key == attempt), None)

    def pulled_as(self, receiver: str, number: int) -> Departure | None:
        """Return the departure that this holder has pulled under this number."""
        found = (
            departure for departure in self._departures if (departure.to.holder, departure.number) == (receiver, number)
        )
        return next(found, None)

    def attempts_to(self, member: str) -> set[Attempt]:
        """Return the attempts on their way to the member of this name."""
        return {departure.running.key for departure in self.wanted if departure.to.name == member}

    def is_late(self, receiver: str, number: int) -> bool:
        """Return whether a Pull was repeated, or came after a later one: its receiver waits for it no longer."""
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


class Offering(CorePart):
    """Offers requests to other workers, which go on with them, and ends the stay of what they have pulled."""

    def __init__(
        self,
        here: Requests,
        departures: Departures,
        memory: DeviceMemory,
        log: WorkerLog,
        outputs: Outputs,
        peer: Callable[[str], Member | None],
        goes_on: Callable[[Departure], None],
        left: Callable[[WorkerRequest, str], list[Command]],
    ) -> None:
        """`peer` returns the worker of a name that is reached directly; `goes_on` has a request go on here; `left`
        releases what is kept for one that is at the named worker now, or nowhere."""
        self._here, self.departures, self._memory, self._outputs = here, departures, memory, outputs
        self._notes, self._faults, self._decisions = log.notes, log.faults, log.decisions
        self._peer, self._goes_on, self._left = peer, goes_on, left
        self._sent: dict[Attempt, None] = {}  # that are with other workers
        self._asks_again = False

    def offer(self, running: WorkerRequest, to: Member, waits_there: bool = False) -> Command:
        """Offer the request to that worker; until it answers the request is in no step."""
        self._decisions.note(Kind.OFFERED, running.request, to.name)
        return self.begin(Departure(running, to, is_offered=True, waits_there=waits_there))

    def begin(self, departure: Departure) -> Command:
        """Let a request depart."""
        self._here.move(departure.running, State.DEPARTING)
        self.departures.add(departure)
        return self._asks(departure)

    def declined(self, message: Decline, frame: Received, now: float) -> None:
        """Let a request go on here that was offered. One that is gone is lost if its KV has not come."""
        attempt = message.request, message.attempt
        departure = self.departures.find(attempt)
        if departure is not None:
            self.stays(departure)
        elif message.is_failed and attempt in self._sent:
            self._notes.note("lost", attempt)  # no worker has it: its owner is to start the next attempt

    def stays(self, departure: Departure) -> None:
        """Let a request go on here, as soon as no transfer reads its blocks."""
        if departure.number is not None:
            departure.is_declined = True
            return
        self.departures.remove(departure)
        self._goes_on(departure)

    def sent(self, departure: Departure, is_ok: bool) -> list[Command]:
        """End the transfer of a request that was offered. Where it failed the request is offered again: the answer says
        whether it came, since two workers must not go on with it."""
        self._faults.num_failed_transfers += not is_ok
        if not departure.is_wanted:
            self.remove(departure)
            return []
        departure.number = None
        if departure.is_declined or self._peer(departure.to.name) != departure.to:
            self.stays(departure)
            return []
        if not is_ok:
            return [self._asks(departure)]
        running = departure.running
        self._sent[running.key] = None
        if len(self._sent) > _MOST_SENT:
            del self._sent[next(iter(self._sent))]
        self._outputs.forget([running.request.id])  # that worker has the whole output
        self.remove(departure)
        return self._left(running, departure.to.name)

    def remove(self, departure: Departure) -> None:
        """Free the blocks of a request that is here no more."""
        self.departures.remove(departure)
        self._here.move(departure.running, State.GONE)
        self._memory.give(departure.running.blocks)

    def peer_lost(self, peer: Member) -> None:
        """Let requests go on here that were to go to a worker that is lost. A transfer's end is heard in any case."""
        for departure in [departure for departure in self.departures.unpulled if departure.to == peer]:
            self.stays(departure)

    # --- Requests that depart

    def drop(self, request: str, attempt: int) -> list[Command]:
        commands: list[Command] = []
        for departure in self.departures.wanted:
            if departure.running.is_of(request, attempt):
                if departure.number is None:
                    self.remove(departure)
                else:
                    self._here.move(departure.running, State.ABANDONED)
                commands += self._left(departure.running, "")
        return commands

    def ask_again(self) -> None:
        self._asks_again = True

    def ask_pending(self, now: float) -> list[Command]:
        """Tell workers again of requests that they have not pulled: the order or its answer may be lost."""
        again, self._asks_again = self._asks_again, False
        return [self._asks(departure) for departure in self.departures.unpulled] if again else []

    def repeat(self, to: str) -> list[Command]:
        return [self._asks(departure) for departure in self.departures.unpulled if departure.to.name == to]

    @property
    def awaits_answer(self) -> bool:
        return len(self.departures) > 0

    def _asks(self, departure: Departure) -> Command:
        """Ask the other worker to pull the KV."""
        entry = departure.running.entry((), departure.running.names)
        offer = Offer(entry, not departure.waits_there) if departure.is_offered else Evict(entry, departure.wait_s)
        return Send(departure.to.name, offer)
