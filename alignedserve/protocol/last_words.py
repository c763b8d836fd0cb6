"""Which requests an event is about, and what a part says of them before it ends because its core has failed there.

Their owners count a death, as for requests whose worker has ended (owner/core.py). So a request that ends each core
that hears of it is soon given up, and no other is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from alignedserve.core import Request
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, Received
from alignedserve.protocol.messages import ROUTER, Attempt, AttemptLost, Declare, Progress, Tokens


class FailedAt(Exception):
    """A core has failed while it worked on this request, which need not be that of the event that it heard."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"at request {request.id}, attempt {request.attempt}")
        self.request = request


@contextmanager
def working_on(request: Request) -> Iterator[None]:
    """Say which request it was where the block fails: an event may have a core go on with any."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise FailedAt(request) from error


def last_words(me: str, event: Event, error: BaseException | None = None) -> list[Command]:
    """Return what this part, whose core has failed at the event with the error, is to say."""
    requests = (error.request,) if isinstance(error, FailedAt) else _requests(event)
    if me == ROUTER:
        alone = len(requests) == 1
        return [Send(each.owner, AttemptLost(each.id, each.attempt, died=True, alone=alone)) for each in requests]
    attempts = tuple((each.id, each.attempt) for each in requests) or attempts_of(event)
    return [Send(ROUTER, Progress(felled=attempts))] if attempts else []


def attempts_of(event: Event) -> tuple[Attempt, ...]:
    """Return the attempts that the event is about, where it names them one by one."""
    if requests := _requests(event):
        return tuple((request.id, request.attempt) for request in requests)
    said = event.message if isinstance(event, Received) else event
    if isinstance(said, Tokens):
        return tuple((output.request, output.attempt) for output in said.outputs)
    named = getattr(said, "request", None)
    return ((named, getattr(said, "attempt", 0)),) if isinstance(named, str) else ()


def _requests(event: Event) -> Sequence[Request]:
    said = event.message if isinstance(event, Received) else event
    if isinstance(said, Declare):
        return said.requests
    request = getattr(getattr(said, "entry", said), "request", None)
    return (request,) if isinstance(request, Request) else ()
