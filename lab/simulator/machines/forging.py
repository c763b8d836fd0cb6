"""Frames that no part may say: a process that has the keys of the parts may make them.

Each calls itself the launcher, a life that the launcher never started, or a part whose role may not say this. All are
dropped, so a run with them is the same as without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from alignedserve.core import FinishReason, Role
from alignedserve.protocol.membership import UNNUMBERED
from alignedserve.protocol.messages import (
    LAUNCHER,
    AttemptLost,
    Cancel,
    Died,
    Heartbeat,
    Life,
    Member,
    Members,
    Message,
    Output,
    Progress,
    Release,
    Retire,
    Started,
    Tokens,
)
from alignedserve.protocol.wire import Envelope

_LATE = 2**62  # an incarnation after all others
_REQUESTS = tuple(f"request-{number}" for number in range(20))
_UNKNOWN = "decode-99"


def forgeries(to: Role, lives: Iterable[Life]) -> Iterator[Envelope]:
    """Yield the frames that a member of this role gets, in the names of members with these lives."""
    newest = [life for life in lives if life.role is not Role.ROUTER]
    if to is Role.ROUTER:
        yield from (frame for life in newest for frame in _to_router(life))
        yield _frame(_UNKNOWN, 1, Heartbeat(Member(_UNKNOWN, Role.DECODE, "local", 1, _UNKNOWN)))
        return
    said = [message for kind, messages in _TO.items() if kind is to for message in messages]
    for life in newest:
        yield from (_frame(life.name, _LATE, message) for message in said)
        yield from (_frame(life.name, life.incarnation, message) for message in _NOBODYS)
    yield from (_frame(_UNKNOWN, 1, message) for message in said)


def _to_router(life: Life) -> Iterator[Envelope]:
    me = Member(life.name, life.role, "local", life.incarnation, f"{life.name}#{life.incarnation}")
    died, late = Died(life.name, life.incarnation), replace(life, incarnation=_LATE)
    yield from (_frame(LAUNCHER, 0, message) for message in (died, Started((late,)), Retire(life.name, _LATE)))
    yield from (_frame(life.name, life.incarnation, message) for message in (died, Started((late,)), Members(())))
    yield _frame(life.name, _LATE, Heartbeat(replace(me, incarnation=_LATE)))
    yield _frame(life.name, life.incarnation, Heartbeat(replace(me, role=_other(life.role))))
    yield _frame(life.name, _LATE, Progress(ended=tuple((request, 0) for request in _REQUESTS)))


def _other(role: Role) -> Role:
    return Role.POOL if role is not Role.POOL else Role.DECODE


def _frame(sender: str, incarnation: int, message: Message) -> Envelope:
    return Envelope(sender, incarnation, UNNUMBERED, message)


_NOBODYS: tuple[Message, ...] = (Members(()), Died("decode-0", 1), Retire("decode-0", 1))  # only routers and launchers
_TO: dict[Role, tuple[Message, ...]] = {
    Role.GATEWAY: (
        Tokens(tuple(Output(request, 0, 0, (7,) * 5, FinishReason.STOP) for request in _REQUESTS)),
        *(AttemptLost(request, 0) for request in _REQUESTS),
    ),
    Role.PREFILL: tuple(Cancel(request, 0) for request in _REQUESTS),
    Role.DECODE: tuple(Cancel(request, 0) for request in _REQUESTS),
    Role.POOL: tuple(Release(request, 0) for request in _REQUESTS),
}
