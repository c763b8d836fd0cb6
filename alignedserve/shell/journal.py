"""Log lines that say where a request goes next, and never quote its text.

The lines of all parts about one request have the id that is also the answer's x-request-id.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from alignedserve.core import Entry, Request
from alignedserve.forms.messages import Evict, Prefetched
from alignedserve.protocol.messages import (
    ROUTER,
    AttemptLost,
    Batch,
    Cancel,
    Commit,
    Message,
    Prefill,
    Progress,
    Pull,
    Refused,
    Submit,
)

log = logging.getLogger("alignedserve.requests")

_MISHAPS = (Refused, AttemptLost)


def note(to: str, message: Message) -> None:
    """Log a line for each request that this message moves on. An ordinary move is for `log.level` debug: each request
    has some, and a log should not fill its disk."""
    level = logging.INFO if isinstance(message, _MISHAPS) else logging.DEBUG
    if log.isEnabledFor(level):
        for request, attempt, what in _moves(to, message):
            log.log(level, what, extra={"fields": {"request_id": request, "attempt": attempt}})


def _moves(to: str, message: Message) -> Iterator[tuple[str, int, str]]:
    """Yield (request, attempt, what happens)."""
    match message:
        case Submit(request):
            yield *_attempt_of(request), "submitted"
        case Prefill(request):
            yield *_attempt_of(request), f"goes to {to}"
        case Commit(Entry(request=request)):
            yield *_attempt_of(request), f"goes to {to}"
        case Batch(entries):
            for entry in entries:
                yield *_attempt_of(entry.request), f"goes to {to}"
        case Pull(_, request_id, attempt):
            yield request_id, attempt, f"is pulled from {to}"
        case Evict(Entry(request=request)):
            yield *_attempt_of(request), f"is to leave for {to}"
        case Prefetched(attempts):
            yield from ((*attempt, f"is prefetched for {to}") for attempt in attempts)
        case Progress(ended=ended, lost=lost, unknown=unknown):
            yield from ((*attempt, "ended") for attempt in ended)
            yield from ((*attempt, "lost") for attempt in (*lost, *unknown))
        case Refused(request_id, attempt):
            yield request_id, attempt, "refused"
        case AttemptLost(request_id, attempt):
            yield request_id, attempt, "lost: its owner is to start the next attempt"
        case Cancel(request_id, attempt) if to == ROUTER:
            yield request_id, attempt, "cancelled"


def _attempt_of(request: Request) -> tuple[str, int]:
    return request.id, request.attempt
