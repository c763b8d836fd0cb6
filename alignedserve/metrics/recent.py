"""Keep what an owner saw of its requests in the last 24 hours: throughput, attainment, latencies, the worst requests.

Memory is bounded: each time range that the live page offers has NUM_SLOTS slots of time, which have counts and a few
requests each. A slot of 10 s that is over is added to the slots of the longer ranges.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import ceil, log
from typing import Any, TypeAlias, TypeVar

from alignedserve.core import ServiceClass, TokenTimes

SLOT_S = 10.0
NUM_SLOTS = 90
WINDOW_S = NUM_SLOTS * SLOT_S
SLOTS_S = (SLOT_S, 40.0, 240.0, 960.0)  # of 15 minutes, an hour, 6 hours, a day
MOST_SLOWEST = 8  # requests of each class
MOST_OF_REASON = 3  # requests that missed their promise for one reason
MOST_KEYS = 20
_MOST_KEPT_KEYS = 100  # of a slot of a longer range
_MOST_WHY = 300  # characters of a refusal's reason

Spread: TypeAlias = dict[int, int]  # how many values fell into each bucket, without the empty ones
_LEAST_S, _STEP = 0.001, log(1.25)  # bucket n ends at 0.001 s times 1.25 to the n


def bucket_of(seconds: float) -> int:
    return ceil(log(seconds / _LEAST_S) / _STEP) if seconds > _LEAST_S else 0


def _sum(one: Any, other: Any) -> Any:
    if not one or not other:
        return one or other
    return dict(Counter(one) + Counter(other)) if isinstance(one, dict) else one + other


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a class in one slot of time."""

    tokens: int = 0  # of output, as they reached the owner
    ended: int = 0  # requests that ended
    asked: int = 0  # requests that asked for a promise, ended or refused
    kept: int = 0  # of them, requests that got all that was promised
    refused: int = 0
    prompt_tokens: int = 0  # of requests that ended
    cached_tokens: int = 0  # of them, tokens whose KV a device or the pool had
    missed: dict[str, int] = field(default_factory=dict)  # what a request missed first, or `error` -> requests
    ttft: Spread = field(default_factory=dict)  # of requests that ended
    waits: Spread = field(default_factory=dict)  # the same: until the prompt began to run
    gaps: Spread = field(default_factory=dict)  # between tokens
    device_s: float = 0.0  # time of workers, of requests that ended
    joules: float = 0.0
    price: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(_sum(getattr(self, part.name), getattr(other, part.name)) for part in fields(Counts)))


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
    missed: str  # the first missed deadline, or error; empty: all promises were kept, or none was asked for
    times: TokenTimes
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # of the prompt
    waited_s: float | None = None  # until the prompt began to run; None: not known
    ttft_s: float = 0.0  # that was promised; 0: none was asked for
    tbt_s: float = 0.0  # the same, between two tokens
    key: str = ""  # of its caller
    device_s: float = 0.0  # time of workers that it used
    joules: float = 0.0
    price: float = 0.0
    is_asked: bool = True  # whether the client or the operator asked for a promise


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    id: str
    service: ServiceClass
    tier: str
    at: float
    reason: str  # one word, as in the metric of refusals
    why: str  # as the client was told
    key: str = ""  # of its caller
    is_asked: bool = True


@dataclass(frozen=True, slots=True)
class KeyUse:
    """What the callers of one key used and got."""

    key: str
    ended: int = 0
    missed: int = 0  # of them, requests that did not get all that was promised
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    device_s: float = 0.0  # time of workers
    joules: float = 0.0
    price: float = 0.0

    def __add__(self, other: KeyUse) -> KeyUse:
        added = (getattr(self, part.name) + getattr(other, part.name) for part in fields(KeyUse)[1:])
        return KeyUse(self.key, *added)


@dataclass(frozen=True, slots=True)
class RecentRequests:
    """The requests of one owner, or of all owners together."""

    slots: tuple[Slot, ...] = ()  # the oldest first; the present slot of 10 s is not among them
    slowest: tuple[EndedRequest, ...] = ()  # of each class; the slowest first
    refused: tuple[RefusedRequest, ...] = ()  # the newest of each reason; the newest first
    missed: tuple[EndedRequest, ...] = ()  # the same, of requests that ended
    keys: tuple[KeyUse, ...] = ()  # those with most tokens first


@dataclass(slots=True)
class TokenCount:
    """Output tokens of a class that reached the owner, and the gaps between them; whoever delivers tokens adds them."""

    num: int = 0
    num_seen: int = 0  # of them, those that slots have
    gaps: Spread = field(default_factory=dict)  # that no slot has yet

    def add_gap(self, seconds: float) -> None:
        bucket = bucket_of(seconds)
        self.gaps[bucket] = self.gaps.get(bucket, 0) + 1


@dataclass(slots=True)
class _KeptSlot:
    """A slot with the slowest requests that ended then."""

    slot: Slot
    slowest: tuple[EndedRequest, ...] = ()
    keys: tuple[KeyUse, ...] = ()

    def add(self, other: _KeptSlot) -> None:
        self.slot += other.slot
        self.slowest = slowest_of((*self.slowest, *other.slowest))
        self.keys = _by_key((*self.keys, *other.keys))[:_MOST_KEPT_KEYS]


class RequestLog:
    """Call `tick` about once a second: tokens count for the slot in which it is called."""

    def __init__(self) -> None:
        self.tokens: Mapping[ServiceClass, TokenCount] = {service: TokenCount() for service in ServiceClass}
        # By the length of its slots: those of a range, the oldest first.
        self._kept: Mapping[float, deque[_KeptSlot]] = {slot_s: deque(maxlen=NUM_SLOTS + 1) for slot_s in SLOTS_S}
        self._refused = defaultdict[str, deque[RefusedRequest]](_few)  # by reason, the newest last
        self._missed = defaultdict[str, deque[EndedRequest]](_few)

    def tick(self, now: float) -> None:
        """Count the new tokens."""
        slot = self._at(now).slot
        for service, count in self.tokens.items():
            new, count.num_seen = count.num - count.num_seen, count.num
            gaps, count.gaps = count.gaps, {}
            if new or gaps:
                slot.add(service, Counts(tokens=new, gaps=gaps))

    def end(self, ended: EndedRequest) -> None:
        """Note a request that has ended by itself."""
        kept = self._at(ended.at)
        counts = Counts(
            ended=1,
            asked=int(ended.is_asked),
            kept=int(ended.is_asked and not ended.missed),
            prompt_tokens=ended.prompt_tokens,
            cached_tokens=ended.cached_tokens,
            missed={ended.missed: 1} if ended.missed else {},
            ttft={bucket_of(ended.times.ttft_s): 1},
            waits={} if ended.waited_s is None else {bucket_of(ended.waited_s): 1},
            device_s=ended.device_s,
            joules=ended.joules,
            price=ended.price,
        )
        kept.slot.add(ended.service, counts)
        kept.slowest = slowest_of((*kept.slowest, ended))
        tokens = ended.prompt_tokens, ended.output_tokens
        used = KeyUse(ended.key, 1, int(bool(ended.missed)), 0, *tokens, ended.device_s, ended.joules, ended.price)
        kept.keys = _by_key((*kept.keys, used))
        if ended.missed:
            self._missed[ended.missed].append(ended)

    def refuse(self, refused: RefusedRequest) -> None:
        kept = self._at(refused.at)
        kept.slot.add(refused.service, Counts(asked=int(refused.is_asked), refused=1, missed={refused.reason: 1}))
        kept.keys = _by_key((*kept.keys, KeyUse(refused.key, refused=1)))
        self._refused[refused.reason].append(replace(refused, why=refused.why[:_MOST_WHY]))

    def recent(self, now: float, slot_s: float = SLOT_S) -> RecentRequests:
        """Return the history whose slots have this length."""
        self.tick(now)
        present = int(now // slot_s)
        its = [kept for kept in self._kept[slot_s] if kept.slot.number >= present - NUM_SLOTS]
        slots = (kept.slot for kept in its if slot_s > SLOT_S or kept.slot.number < present)
        with_any = tuple(slot for slot in slots if (slot.rt, slot.be) != (Counts(), Counts()))
        slowest = slowest_of(ended for kept in its for ended in kept.slowest)
        keys = _by_key(used for kept in its for used in kept.keys)
        since = now - NUM_SLOTS * slot_s
        refused = (request for each in self._refused.values() for request in each if request.at >= since)
        missed = (request for each in self._missed.values() for request in each if request.at >= since)
        return RecentRequests(with_any, slowest, _newest(refused), _newest(missed), keys[:MOST_KEYS])

    def _at(self, now: float) -> _KeptSlot:
        """Return the slot of 10 s of this moment. Where it is new, the one before it is over."""
        kept, number = self._kept[SLOT_S], int(now // SLOT_S)
        if not kept or kept[-1].slot.number < number:
            for slot_s in SLOTS_S[1:] if kept else ():
                longer, its_number = self._kept[slot_s], int(kept[-1].slot.number * SLOT_S // slot_s)
                if not longer or longer[-1].slot.number < its_number:
                    longer.append(_KeptSlot(Slot(its_number)))
                longer[-1].add(kept[-1])
            kept.append(_KeptSlot(Slot(number)))
        return kept[-1]


def _few() -> deque[Any]:
    return deque(maxlen=MOST_OF_REASON)


_Request = TypeVar("_Request", EndedRequest, RefusedRequest)


def _newest(requests: Iterable[_Request]) -> tuple[_Request, ...]:
    """Return the newest requests of each reason, the newest first."""
    by_reason = defaultdict[str, list[_Request]](list)
    for request in sorted(requests, key=lambda request: -request.at):
        by_reason[request.missed if isinstance(request, EndedRequest) else request.reason].append(request)
    few = (request for its in by_reason.values() for request in its[:MOST_OF_REASON])
    return tuple(sorted(few, key=lambda request: -request.at))


def slowest_of(ended: Iterable[EndedRequest]) -> tuple[EndedRequest, ...]:
    """Return the slowest requests of each class, the real-time ones first."""
    ranked = sorted(ended, key=lambda request: -request.times.all_s)
    by_class = ([request for request in ranked if request.service is service] for service in ServiceClass)
    return tuple(request for its in by_class for request in its[:MOST_SLOWEST])


def _by_key(uses: Iterable[KeyUse]) -> tuple[KeyUse, ...]:
    """Return one entry for each key, those with most tokens first."""
    by_key: dict[str, KeyUse] = {}
    for used in uses:
        by_key[used.key] = by_key.get(used.key, KeyUse(used.key)) + used
    return tuple(sorted(by_key.values(), key=lambda used: (-used.prompt_tokens - used.output_tokens, used.key)))


def together(owners: Iterable[RecentRequests]) -> RecentRequests:
    """Return the requests of all these owners."""
    owners, slots = list(owners), dict[int, Slot]()
    for slot in (slot for owner in owners for slot in owner.slots):
        slots[slot.number] = slots[slot.number] + slot if slot.number in slots else slot
    refused = _newest(refused for owner in owners for refused in owner.refused)
    missed = _newest(missed for owner in owners for missed in owner.missed)
    slowest = slowest_of(ended for owner in owners for ended in owner.slowest)
    keys = _by_key(used for owner in owners for used in owner.keys)[:MOST_KEYS]
    return RecentRequests(tuple(slots[number] for number in sorted(slots)), slowest, refused, missed, keys)
