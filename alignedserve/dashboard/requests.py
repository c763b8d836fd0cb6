"""Keep what an owner saw of its requests in the last 15 minutes: throughput, attainment, and the worst requests.

Memory is bounded: slots of time have counts and a few requests each, and old slots are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from alignedserve.core import ServiceClass
from alignedserve.dashboard.picture import (
    MOST_REFUSED,
    SLOT_S,
    WINDOW_S,
    Counts,
    EndedRequest,
    RefusedRequest,
    RequestsPicture,
    Slot,
    slowest_of,
)

_NUM_SLOTS = int(WINDOW_S / SLOT_S)


@dataclass(slots=True)
class TokenCount:
    """Output tokens of a class that reached the owner. Whoever delivers tokens adds to it, and does no more."""

    num: int = 0
    num_seen: int = 0  # of them, those that slots have


@dataclass(slots=True)
class _OpenSlot:
    number: int
    counts: dict[ServiceClass, Counts] = field(default_factory=lambda: dict.fromkeys(ServiceClass, Counts()))
    slowest: tuple[EndedRequest, ...] = ()

    def add(self, service: ServiceClass, counts: Counts) -> None:
        self.counts[service] = self.counts[service] + counts

    @property
    def has_any(self) -> bool:
        return any(counts != Counts() for counts in self.counts.values())

    @property
    def closed(self) -> Slot:
        return Slot(self.number, self.counts[ServiceClass.RT], self.counts[ServiceClass.BE])


class RequestLog:
    """Call `tick` about once a second: tokens count for the slot in which it is called."""

    def __init__(self) -> None:
        self.tokens: Mapping[ServiceClass, TokenCount] = {service: TokenCount() for service in ServiceClass}
        self._slots: deque[_OpenSlot] = deque()  # the oldest first
        self._refused: deque[RefusedRequest] = deque(maxlen=MOST_REFUSED)  # the newest last

    def tick(self, now: float) -> None:
        """Count the new tokens, and drop what is older than the window."""
        slot = self._slot(now)
        for service, count in self.tokens.items():
            new, count.num_seen = count.num - count.num_seen, count.num
            if new:
                slot.add(service, Counts(tokens=new))
        while self._refused and self._refused[0].at < now - WINDOW_S:
            self._refused.popleft()

    def end(self, ended: EndedRequest) -> None:
        """Note a request that has ended by itself."""
        slot = self._slot(ended.at)
        slot.add(ended.service, Counts(ended=1, kept=int(not ended.missed)))
        slot.slowest = slowest_of((*slot.slowest, ended))

    def refuse(self, refused: RefusedRequest) -> None:
        self._slot(refused.at).add(refused.service, Counts(refused=1))
        self._refused.append(replace(refused, why=refused.why[:_MOST_WHY]))

    def picture(self, now: float) -> RequestsPicture:
        self.tick(now)
        present = self._slots[-1].number
        slots = tuple(slot.closed for slot in self._slots if slot.number != present and slot.has_any)
        slowest = slowest_of(ended for slot in self._slots for ended in slot.slowest)
        return RequestsPicture(slots, slowest, tuple(reversed(self._refused)))

    def _slot(self, now: float) -> _OpenSlot:
        """Return the slot of this moment."""
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(_OpenSlot(number))
        while self._slots[0].number < number - _NUM_SLOTS:
            self._slots.popleft()
        return self._slots[-1]


_MOST_WHY = 300  # characters of a refusal's reason
