"""Which requests a core is working on: those that its process may end at.

Their owners count a death, as for requests whose worker has ended (owner/core.py). So a request that ends each core
that hears of it is soon given up, and no other is.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.core import Request
from alignedserve.protocol.events import Event, Received
from alignedserve.protocol.messages import Attempt, Batch, Declare, Progress, Tokens


class AtWork:
    """What a core is working on. The shell notes the attempts that each event is about; a core that goes on with
    others says so. A worker, a pool and a router keep the note where it outlives their process."""

    left: tuple[Attempt, ...] = ()  # what the life before was working on when it ended

    def __init__(self) -> None:
        self.attempts: tuple[Attempt, ...] = ()

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
    match said:
        case Declare(requests):
            return requests
        case Batch(entries):
            return [entry.request for entry in entries]
    request = getattr(getattr(said, "entry", said), "request", None)
    return (request,) if isinstance(request, Request) else ()
