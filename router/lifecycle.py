"""The life of an open request, as the router sees it: one table of states, facts and transitions.

An attempt begins in WAITING, when the owner submits or declares it, passes the three places that can have it, and ends
in one of the four last states. Frames may be lost or come late, so a request can skip places: the router may hear that
a decode worker has a request before hearing that a pool had it.

The table is the only place that says which transitions exist. Any other transition is a bug, and raises
`IllegalTransition` with the request's story. docs/reference/internals.md shows the table as a picture,
which `diagram` draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from alignedserve.core import Request, Role, ServiceClass
from alignedserve.protocol.figures import ByClass, Stages
from alignedserve.protocol.messages import Attempt, Member


class State(int, Enum):
    WAITING = 0  # for a worker: none has the prompt
    PREFILL = 1  # a prefill worker has the request
    POOL = 2  # the KV pool of a node has the request
    DECODE = 3  # a decode worker has the request
    ENDED = 4  # the output is complete
    LOST = 5  # the attempt is lost: the owner submits the next one
    CANCELLED = 6  # the owner wants no more, or is gone
    REPLACED = 7  # a later attempt has come instead


PLACES = MappingProxyType({Role.PREFILL: State.PREFILL, Role.POOL: State.POOL, Role.DECODE: State.DECODE})
OPEN = (State.WAITING, *PLACES.values())


class Fact(str, Enum):
    PLACED = "placed"  # the router has sent the prompt to a worker
    HELD = "held"  # after a restart of the router: a member says that the request is there
    ARRIVED = "arrived"  # a member reports that the request has come
    RETURNED = "returned"  # a worker had to give the request up, which waits in the node's pool again
    ENDED = "ended"
    LOST = "lost"
    CANCELLED = "cancelled"
    REPLACED = "replaced"


_PREFILL, _POOL, _DECODE = State.PREFILL, State.POOL, State.DECODE
_ENDS = MappingProxyType(
    {
        Fact.ENDED: (State.ENDED,),
        Fact.LOST: (State.LOST,),
        Fact.CANCELLED: (State.CANCELLED,),
        Fact.REPLACED: (State.REPLACED,),
    }
)

# State -> fact -> possible next states. A request is never reported back to an earlier place, except by RETURNED; a
# request may move between two workers, or two pools, of one kind.
TRANSITIONS: Mapping[State, Mapping[Fact, tuple[State, ...]]] = MappingProxyType(
    {
        State.WAITING: {
            Fact.PLACED: (_PREFILL, _DECODE),
            Fact.HELD: (_PREFILL, _POOL, _DECODE),
            Fact.ARRIVED: (_PREFILL, _POOL, _DECODE),
            **_ENDS,
        },
        State.PREFILL: {
            Fact.HELD: (_POOL, _DECODE),
            Fact.ARRIVED: (_PREFILL, _POOL, _DECODE),
            Fact.RETURNED: (_POOL,),
            **_ENDS,
        },
        State.POOL: {Fact.HELD: (_DECODE,), Fact.ARRIVED: (_POOL, _DECODE), **_ENDS},
        State.DECODE: {Fact.ARRIVED: (_DECODE,), Fact.RETURNED: (_POOL,), **_ENDS},
        State.ENDED: {},
        State.LOST: {},
        State.CANCELLED: {},
        State.REPLACED: {},
    }
)


class IllegalTransition(Exception):
    """The router took a request where the table forbids; the text tells what happened to the request before."""


@dataclass(slots=True)
class OpenRequest:
    """A request's present attempt, its state, and the member that has the request."""

    request: Request
    moved_at: float  # when the router last heard of the request, or inquired
    is_declared: bool = False  # the owner declared it to a router that had restarted
    state: State = State.WAITING
    at: str = ""  # name of the member that has the request; empty while it waits for a worker
    _story: list[tuple[Fact, State, str]] = field(default_factory=list)  # every transition so far

    @property
    def key(self) -> Attempt:
        return self.request.id, self.request.attempt

    @property
    def is_waiting(self) -> bool:
        return self.state is State.WAITING

    def becomes(self, state: State, fact: Fact, at: str = "") -> None:
        """Take a transition of the table; `at` names the member that has the request then."""
        if state not in TRANSITIONS[self.state].get(fact, ()):
            raise IllegalTransition(self._tell(state, fact, at))
        self._story.append((fact, state, at))
        self.state, self.at = state, at

    def _tell(self, state: State, fact: Fact, at: str) -> str:
        steps = [f"{past.value} -> {then.name}{_at(place)}" for past, then, place in self._story]
        told = ", ".join(steps) or "nothing had happened to it"
        id, attempt = self.key
        return (
            f"request {id}, attempt {attempt}, is in {self.state.name}{_at(self.at)} and cannot be "
            f"{fact.value} -> {state.name}{_at(at)}; its story: {told}"
        )


class OpenRequests:
    """The open requests with their present attempts, and how many are in each state."""

    def __init__(self) -> None:
        self._all: dict[str, OpenRequest] = {}  # by the request's id
        self._num: dict[ServiceClass, Counter[State]] = {service: Counter() for service in ServiceClass}
        self.waiting: dict[str, OpenRequest] = {}  # those in WAITING, in order of arrival
        self.suspects: dict[str, OpenRequest] = {}  # those that may run only alone, in order of arrival
        self._charged: dict[str, OpenRequest] = {}  # those with a death, until they get past that place
        self._given_up: Counter[tuple[ServiceClass, Fact]] = Counter()  # attempts that were lost or came back

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(self._all.values())

    def get(self, id: str) -> OpenRequest | None:
        return self._all.get(id)

    def current(self, key: Attempt) -> OpenRequest | None:
        """Return the open request if this is the present attempt."""
        opened = self._all.get(key[0])
        return opened if opened is not None and opened.request.attempt == key[1] else None

    def is_unknown(self, key: Attempt) -> bool:
        """Return whether neither this attempt nor a later one is open."""
        opened = self._all.get(key[0])
        return opened is None or opened.request.attempt < key[1]

    def stages(self, service: ServiceClass) -> Stages:
        """Count the open requests of a class by place."""
        return Stages(*(self._num[service][state] for state in OPEN))

    def num_tried(self, service: ServiceClass) -> tuple[int, int]:
        """Count the requests of a class that members have, and that stand about where their last worker ended: at
        prefill workers, and in all."""
        charged = [each for each in self._charged.values() if each.request.service is service and not each.is_waiting]
        return sum(each.state is State.PREFILL for each in charged), len(charged)

    def acquit(self, opened: OpenRequest) -> None:
        self._charged.pop(opened.request.id, None)
        opened.request = replace(opened.request, deaths=0)

    def num_given_up(self, fact: Fact) -> ByClass:
        """Count how often a worker gave a request back, or an attempt was lost, so far."""
        return ByClass(*(self._given_up[service, fact] for service in ServiceClass))

    def add(self, opened: OpenRequest) -> None:
        self._all[opened.request.id] = self.waiting[opened.request.id] = opened
        self._num[opened.request.service][opened.state] += 1
        if opened.request.deaths:
            self._charged[opened.request.id] = opened
        if opened.request.is_suspect:
            self.suspects[opened.request.id] = opened

    def move(self, opened: OpenRequest, to: Member, fact: Fact, now: float) -> None:
        """Record that `to` has the request now."""
        self.waiting.pop(opened.request.id, None)
        num = self._num[opened.request.service]
        num[opened.state] -= 1
        opened.becomes(PLACES[to.role], fact, to.name)
        opened.moved_at = now
        if fact is Fact.RETURNED:
            self._given_up[opened.request.service, fact] += 1
        num[opened.state] += 1

    def remove(self, opened: OpenRequest, end: State, fact: Fact) -> None:
        """Forget the request, which has come to this end."""
        for some in (self.waiting, self.suspects, self._charged):
            some.pop(opened.request.id, None)
        self._num[opened.request.service][opened.state] -= 1
        del self._all[opened.request.id]
        opened.becomes(end, fact)
        if fact is Fact.LOST:
            self._given_up[opened.request.service, fact] += 1


def _at(member: str) -> str:
    return f" at {member}" if member else ""


def diagram() -> str:
    """Return the table as a Mermaid state diagram, without its four ends, which every open state has."""
    lines = ["stateDiagram-v2", "    [*] --> WAITING: submitted or declared"]
    for before in OPEN:
        facts: dict[State, list[str]] = {}
        for fact, states in TRANSITIONS[before].items():
            for after in states:
                if after in OPEN:
                    facts.setdefault(after, []).append(fact.value)
        lines += [f"    {before.name} --> {after.name}: {', '.join(names)}" for after, names in facts.items()]
    ends = ", ".join(fact.value for fact in _ENDS)
    lines.append(f"    DECODE --> [*]: {ends} (from every state)")
    return "\n".join(lines)
