"""What a part's log says of a request on its road: where it goes next, never its words.

The lines of all parts about one request have its id, which is also the answer's x-request-id.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from alignedserve.core import Entry, Request
from alignedserve.protocol.messages import (
    ROUTER,
    AttemptLost,
    Batch,
    Cancel,
    Commit,
    Evict,
    Message,
    Prefetched,
    Prefill,
    Progress,
    Pull,
    Refused,
    Submit,
)

log = logging.getLogger("alignedserve.requests")


def note(to: str, message: Message) -> None:
    """A line for each request that this message moves on."""
    if log.isEnabledFor(logging.INFO):
        for request, attempt, what in _moves(to, message):
            log.info(what, extra={"fields": {"request_id": request, "attempt": attempt}})


def _moves(to: str, message: Message) -> Iterator[tuple[str, int, str]]:
    match message:
        case Submit(request):
            yield *_of(request), "submitted"
        case Prefill(request):
            yield *_of(request), f"goes to {to}"
        case Commit(Entry(request=request)):
            yield *_of(request), f"goes to {to}"
        case Batch(entries):
            for entry in entries:
                yield *_of(entry.request), f"goes to {to}"
        case Pull(_, request_id, attempt):
            yield request_id, attempt, f"is pulled from {to}"
        case Evict(Entry(request=request)):
            yield *_of(request), f"is to leave for {to}"
        case Prefetched(attempts):
            yield from ((*one, f"is prefetched for {to}") for one in attempts)
        case Progress(ended=ended, lost=lost, unknown=unknown):
            yield from ((*one, "ended") for one in ended)
            yield from ((*one, "lost") for one in (*lost, *unknown))
        case Refused(request_id, attempt):
            yield request_id, attempt, "refused"
        case AttemptLost(request_id, attempt):
            yield request_id, attempt, "lost: its owner is to start the next attempt"
        case Cancel(request_id, attempt) if to == ROUTER:
            yield request_id, attempt, "cancelled"


def _of(request: Request) -> tuple[str, int]:
    return request.id, request.attempt
