"""Which requests a core is working on.

Where its process ends amid that work, one of these requests may be the cause. So the owners count a death for each, as
for the requests of a worker that has ended (owner/core.py): a request that ends every process that works on it is given
up after three deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.core import Request
from alignedserve.protocol.events import Event, Received
from alignedserve.protocol.messages import Attempt, Declare, Progress, Tokens


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
