"""Keep what an owner saw of its requests in the last 15 minutes: throughput, attainment, and the worst requests.

Memory is bounded: slots of time have counts and a few requests each, and old slots are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from alignedserve.core import ServiceClass, TokenTimes

SLOT_S = 10.0
WINDOW_S = 900.0  # that is kept
MOST_SLOWEST = 8  # requests of each class
MOST_REFUSED = 20
_MOST_WHY = 300  # characters of a refusal's reason


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a class in one slot of time."""

    tokens: int = 0  # of output, as they reached the owner
    ended: int = 0  # requests that ended
    kept: int = 0  # of them, requests that got all that was promised
    refused: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Counts)))


@dataclass(slots=True)
class Slot:
    number: int  # times SLOT_S is its beginning; a slot in which nothing happened is left out
    rt: Counts = Counts()
    be: Counts = Counts()

    def add(self, service: ServiceClass, counts: Counts) -> None:
        if service is ServiceClass.RT:
            self.rt += counts
        else:
            self.be += counts

    def __add__(self, other: Slot) -> Slot:
        return Slot(self.number, self.rt + other.rt, self.be + other.be)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended. It is the slower, the longer it took in all."""

    id: str
    service: ServiceClass
    tier: str
    at: float  # of its end
    missed: str  # the first deadline that it missed, or error; empty: it got all that was promised
    times: TokenTimes
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    id: str
    service: ServiceClass
    tier: str
    at: float
    reason: str  # one word, as in the metric of refusals
    why: str  # as the client was told


@dataclass(frozen=True, slots=True)
class RecentRequests:
    """The requests of one owner, or of all owners together."""

    slots: tuple[Slot, ...] = ()  # the oldest first; the present slot is not among them
    slowest: tuple[EndedRequest, ...] = ()  # of each class; the slowest first
    refused: tuple[RefusedRequest, ...] = ()  # the newest first


@dataclass(slots=True)
class TokenCount:
    """Output tokens of a class that reached the owner. Whoever delivers tokens adds to it, and does no more."""

    num: int = 0
    num_seen: int = 0  # of them, those that slots have


@dataclass(slots=True)
class _KeptSlot:
    """A slot with the slowest requests that ended in it."""

    slot: Slot
    slowest: tuple[EndedRequest, ...] = ()


class RequestLog:
    """Call `tick` about once a second: tokens count for the slot in which it is called."""

    def __init__(self) -> None:
        self.tokens: Mapping[ServiceClass, TokenCount] = {service: TokenCount() for service in ServiceClass}
        self._kept: deque[_KeptSlot] = deque()  # the oldest first
        self._refused: deque[RefusedRequest] = deque(maxlen=MOST_REFUSED)  # the newest last

    def tick(self, now: float) -> None:
        """Count the new tokens, and drop what is older than the window."""
        slot = self._at(now).slot
        for service, count in self.tokens.items():
            new, count.num_seen = count.num - count.num_seen, count.num
            if new:
                slot.add(service, Counts(tokens=new))
        while self._refused and self._refused[0].at < now - WINDOW_S:
            self._refused.popleft()

    def end(self, ended: EndedRequest) -> None:
        """Note a request that has ended by itself."""
        kept = self._at(ended.at)
        kept.slot.add(ended.service, Counts(ended=1, kept=int(not ended.missed)))
        kept.slowest = slowest_of((*kept.slowest, ended))

    def refuse(self, refused: RefusedRequest) -> None:
        self._at(refused.at).slot.add(refused.service, Counts(refused=1))
        self._refused.append(replace(refused, why=refused.why[:_MOST_WHY]))

    def recent(self, now: float) -> RecentRequests:
        self.tick(now)
        slots = (kept.slot for kept in [*self._kept][:-1])
        with_any = tuple(slot for slot in slots if (slot.rt, slot.be) != (Counts(), Counts()))
        slowest = slowest_of(ended for kept in self._kept for ended in kept.slowest)
        return RecentRequests(with_any, slowest, tuple(reversed(self._refused)))

    def _at(self, now: float) -> _KeptSlot:
        """Return the slot of this moment."""
        number = int(now // SLOT_S)
        if not self._kept or self._kept[-1].slot.number < number:
            self._kept.append(_KeptSlot(Slot(number)))
        while self._kept[0].slot.number < number - int(WINDOW_S / SLOT_S):
            self._kept.popleft()
        return self._kept[-1]


def slowest_of(ended: Iterable[EndedRequest]) -> tuple[EndedRequest, ...]:
    """Return the slowest requests of each class, the real-time ones first."""
    ranked = sorted(ended, key=lambda request: -request.times.all_s)
    by_class = ([request for request in ranked if request.service is service] for service in ServiceClass)
    return tuple(request for its in by_class for request in its[:MOST_SLOWEST])


def together(owners: Iterable[RecentRequests]) -> RecentRequests:
    """Return the requests of all these owners."""
    owners, slots = list(owners), dict[int, Slot]()
    for slot in (slot for owner in owners for slot in owner.slots):
        slots[slot.number] = slots[slot.number] + slot if slot.number in slots else slot
    refused = sorted((refused for owner in owners for refused in owner.refused), key=lambda refused: -refused.at)
    slowest = slowest_of(ended for owner in owners for ended in owner.slowest)
    return RecentRequests(tuple(slots[number] for number in sorted(slots)), slowest, tuple(refused[:MOST_REFUSED]))
