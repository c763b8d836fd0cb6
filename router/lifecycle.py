"""The life of an open request, as the router sees it: one table of states, facts and transitions.

An attempt begins in WAITING, when its owner submits or declares it, and passes the three places that can have it. It
ends in one of the four last states. Frames may be lost or come late, so a request can skip places: the router may hear
that a decode worker has a request before it hears that a pool had it.

The table is the only place that says which transitions exist. A transition that it does not have is a bug, and raises
`IllegalTransition` with the request's story. docs/architecture.md shows the table as a picture, which `diagram` draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from alignedserve.core import Request, Role
from alignedserve.protocol.messages import Attempt


class State(int, Enum):
    WAITING = 0  # for a worker: none has the prompt
    PREFILL = 1  # a prefill worker has it
    POOL = 2  # the KV pool of a node has it
    DECODE = 3  # a decode worker has it
    ENDED = 4  # its output is complete
    LOST = 5  # the attempt is lost: the owner submits the next one
    CANCELLED = 6  # its owner wants no more of it, or is gone
    REPLACED = 7  # a later attempt has come in its place


PLACES = MappingProxyType({Role.PREFILL: State.PREFILL, Role.POOL: State.POOL, Role.DECODE: State.DECODE})
OPEN = (State.WAITING, *PLACES.values())


class Fact(str, Enum):
    PLACED = "placed"  # the router has sent the prompt to a worker
    HELD = "held"  # after a restart of the router: a member says that it has the request
    ARRIVED = "arrived"  # a member reports that the request has come to it
    RETURNED = "returned"  # a worker had to give the request up: it waits in its node's pool again
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

# State -> fact -> the states that the request may be in then. A request is never reported back to an earlier place,
# except by RETURNED; it may move between two workers, or two pools, of one kind.
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
        State.POOL: {
            Fact.HELD: (_DECODE,),
            Fact.ARRIVED: (_POOL, _DECODE),
            **_ENDS,
        },
        State.DECODE: {
            Fact.ARRIVED: (_DECODE,),
            Fact.RETURNED: (_POOL,),
            **_ENDS,
        },
        State.ENDED: {},
        State.LOST: {},
        State.CANCELLED: {},
        State.REPLACED: {},
    }
)


class IllegalTransition(Exception):
    """The router took a request where the table does not let it go; the text tells what happened to it before."""


@dataclass(slots=True)
class OpenRequest:
    """A request's present attempt, the state that it is in, and the member that has it."""

    request: Request
    moved_at: float  # when the router last heard of the request, or inquired after it
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
