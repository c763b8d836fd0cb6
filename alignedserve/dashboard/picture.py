"""A picture of the deployment at a moment: what the page is given, whether it is live or recorded.

Every instant is in seconds by the clock of the deployment's parts: of 1970, or of the simulated run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import msgspec

from alignedserve.core import Role, ServiceClass, TokenTimes, Usage
from alignedserve.protocol.figures import DecodeLengths, PagesFor, Stages

SLOT_S = 10.0  # between two points of a chart
WINDOW_S = 900.0  # that a chart shows
MOST_SLOWEST = 8  # requests of each class in a picture
MOST_REFUSED = 20


@dataclass(frozen=True, slots=True)
class PartPicture:
    name: str
    role: Role
    node: str
    life: int  # the number of its process's life, from 1
    is_here: bool
    since: float  # when it started, or was first seen in this life, or was seen to be gone
    is_again: bool = False  # it was seen in an earlier life, or gone
    is_retiring: bool = False  # of a worker: it takes nothing new, and ends when it is idle
    slowdown: float = 0.0  # of a worker: how many times as long its steps take as in its profile


@dataclass(frozen=True, slots=True)
class QueuePicture:
    """Open requests by class and by where they are, as the router told it."""

    rt: Stages
    be: Stages


@dataclass(frozen=True, slots=True)
class WorkerPicture:
    name: str
    lengths: DecodeLengths
    used: float = 0.0  # share of its device's KV memory


@dataclass(frozen=True, slots=True)
class PoolPicture:
    name: str
    usage: Usage
    holders: tuple[PagesFor, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a class in one slot of time."""

    tokens: int = 0  # of output, as they reached the owner
    ended: int = 0  # requests that ended
    kept: int = 0  # of them, requests that got all that was promised
    refused: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Counts)))


@dataclass(frozen=True, slots=True)
class Slot:
    number: int  # times SLOT_S is its beginning; a slot in which nothing happened is left out
    rt: Counts = Counts()
    be: Counts = Counts()

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
class RequestsPicture:
    """The requests of one owner, or of all owners together."""

    slots: tuple[Slot, ...] = ()  # the oldest first; the present slot is not among them
    slowest: tuple[EndedRequest, ...] = ()  # of each class; the slowest first
    refused: tuple[RefusedRequest, ...] = ()  # the newest first


@dataclass(frozen=True, slots=True)
class JobPicture:
    id: str
    owner: str  # the key's name
    status: str
    done: int  # lines with a result
    failed: int  # of them, lines whose result is an error
    total: int
    created_at: float
    deadline: float
    finish_at: float | None = None  # as the job runner predicts it; None: not known yet
    is_late: bool = False  # whether that is after its deadline


@dataclass(frozen=True, slots=True)
class JobsPicture:
    open: tuple[JobPicture, ...] = ()  # the most urgent first
    more: int = 0  # open jobs that are left out
    trouble: str = ""  # why nothing is known of them now


@dataclass(frozen=True, slots=True)
class Picture:
    at: float
    state: str  # ready, not ready or draining
    models: tuple[str, ...]
    parts: tuple[PartPicture, ...]
    router_at: float | None  # when the router last said how many requests are where; None: never yet
    queues: QueuePicture | None
    workers: tuple[WorkerPicture, ...]
    pools: tuple[PoolPicture, ...]
    requests: RequestsPicture
    jobs: JobsPicture | None = None  # None where the deployment takes none

    def to_json(self) -> bytes:
        """Return it as JSON in one line."""
        return msgspec.json.encode(self)


def slowest_of(ended: Iterable[EndedRequest]) -> tuple[EndedRequest, ...]:
    """Return the slowest requests of each class, the real-time ones first."""
    ranked = sorted(ended, key=lambda request: -request.times.all_s)
    by_class = ([request for request in ranked if request.service is service] for service in ServiceClass)
    return tuple(request for its in by_class for request in its[:MOST_SLOWEST])


def merge_requests(owners: tuple[RequestsPicture, ...]) -> RequestsPicture:
    """Return the requests of all these owners in one picture."""
    slots: dict[int, Slot] = {}
    for owner in owners:
        for slot in owner.slots:
            slots[slot.number] = slots[slot.number] + slot if slot.number in slots else slot
    refused = sorted((refused for owner in owners for refused in owner.refused), key=lambda refused: -refused.at)
    in_order = tuple(slots[number] for number in sorted(slots))
    slowest = slowest_of(ended for owner in owners for ended in owner.slowest)
    return RequestsPicture(in_order, slowest, tuple(refused[:MOST_REFUSED]))
