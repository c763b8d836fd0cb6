"""Events: facts that a shell tells its core, in the past tense. They stay within one process.

A core works on the requests that an event is about. Where its process ends amid that work, one of these requests may be
the cause. So the owners count a death for each, as for the requests of a worker that has ended (owner/core.py): a
request that ends every process that works on it is given up after three deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from alignedserve.core import Request, Sketch, StepResult
from alignedserve.protocol.messages import Attempt, Declare, Member, Message, Progress, Tokens


@dataclass(slots=True)  # made for every frame, and a frozen one takes three times as long
class Received:
    sender: str
    message: Message
    incarnation: int = 0  # of the sender


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """A member is new, or has a new incarnation."""

    member: Member


@dataclass(frozen=True, slots=True)
class MemberLost:
    member: Member


@dataclass(frozen=True, slots=True)
class LinkGap:
    """Some frames from this member did not arrive."""

    sender: str


@dataclass(frozen=True, slots=True)
class Unsent:
    """No frame can hold this message: sending it again would not help."""

    to: str
    message: Message
    why: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    name: str


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class StepDone:
    result: StepResult
    seconds: float = 0.0  # that the step took
    joules: float = 0.0  # energy of its devices; 0 where nothing measures it


@dataclass(frozen=True, slots=True)
class CopiedOut:
    number: int  # of the copy


@dataclass(frozen=True, slots=True)
class CopiedIn:
    """A CopyIn has ended. `intact` is false if a page's header was not as expected: then nothing of the copy may be
    used."""

    number: int
    intact: bool


@dataclass(frozen=True, slots=True)
class PageCompressed:
    pool: str  # its holder
    number: int  # of the order
    done: bool
    seconds: float = 0.0  # in which no step could begin


@dataclass(frozen=True, slots=True)
class KvSent:
    """A SendKv has ended, and its blocks are the core's again."""

    number: int
    to: str  # holder
    ok: bool  # all KV has arrived, or, if there was nothing to send, the receiver knows that


@dataclass(frozen=True, slots=True)
class KvReceived:
    """A ReceiveKv has ended. `intact` is false if some KV is missing or other KV came: then nothing may be used."""

    number: int
    source: str  # holder
    intact: bool


@dataclass(frozen=True, slots=True)
class SyntaxReady:
    """A PrepareSyntax has ended: while the core keeps this attempt, no step waits for its syntax any more."""

    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class HolderGone:
    """The lock of a lost worker is free: it writes to the pages that it held no more."""

    holder: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A client's request has reached the owner."""

    request: Request
    sketch: Sketch | None = None  # of the prompt, where the output's length is to be predicted


@dataclass(frozen=True, slots=True)
class Closed:
    """The client of a request has gone."""

    request: str


@dataclass(frozen=True, slots=True)
class Paused:
    """The client of a request does not read what has come."""

    request: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The client of a request that was paused has read all that has come."""

    request: str


@dataclass(frozen=True, slots=True)
class StoryAsked:
    """A user asks what happened to a request."""

    number: int  # of the question
    request: str


Event: TypeAlias = (
    Received
    | MemberJoined
    | MemberLost
    | LinkGap
    | Unsent
    | TimerFired
    | StepDone
    | CopiedOut
    | CopiedIn
    | PageCompressed
    | KvSent
    | KvReceived
    | SyntaxReady
    | HolderGone
    | Opened
    | Closed
    | Paused
    | Resumed
    | StoryAsked
)
Post: TypeAlias = Callable[[Event | Exception], None]  # to a shell, from any thread: a result, or an error


class AtWork:
    """A note of what a core is working on. The shell writes down the attempts that each event is about, and a core that
    turns to other attempts writes those. The notes of workers, pools and routers outlive their processes
    (shell/work_note.py)."""

    outlives = False  # its process
    left: tuple[Attempt, ...] = ()  # what the life before was working on when it ended

    def __init__(self) -> None:
        self.attempts: tuple[Attempt, ...] = ()
        self.under_way: Callable[[], tuple[Attempt, ...]] = tuple  # what goes on whatever the core turns to

    def on(self, attempts: tuple[Attempt, ...]) -> None:
        self.attempts = attempts


def attempts_of(event: Event) -> tuple[Attempt, ...]:
    """Return the attempts that the event is about, where it names them one by one."""
    said = event.message if isinstance(event, Received) else event
    if requests := _requests(said):
        return tuple((request.id, request.attempt) for request in requests)
    match said:
        case Tokens(outputs):
            return tuple((output.request, output.attempt) for output in outputs)
        case Progress():
            moved = *said.committed, *said.joined, *said.returned, *said.ended, *said.lost, *said.unknown
            return (*moved, *said.felled, *said.cut)
    named = getattr(said, "request", None)
    return ((named, getattr(said, "attempt", 0)),) if isinstance(named, str) else ()


def _requests(said: object) -> Sequence[Request]:
    if isinstance(said, Declare):
        return said.requests
    if entries := getattr(said, "entries", ()):
        return [entry.request for entry in entries]
    request = getattr(getattr(said, "entry", said), "request", None)
    return (request,) if isinstance(request, Request) else ()
