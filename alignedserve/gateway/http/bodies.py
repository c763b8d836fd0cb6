"""Read the bodies of requests within limits: their size, their time, and the memory of all bodies together.

A body that is held in memory has a fixed time to arrive. A file goes to disk as it arrives, and may be hundreds of
megabytes over a slow line: so the more of it has arrived, the longer its client may take.

Callers take turns at what bodies cost before they are requests: parsing, tokenising, the trial of a grammar.

    body         of a caller at once      of all callers                    its texts are tokenised
    short        half of SHORT_AT_ONCE    SHORT_AT_ONCE                     one of a caller, by two threads
    long         2                        LONG_AT_ONCE, above 256 KiB one   by a thread of their own
    with a form  1 trial, 1 of a long body                                  by the threads that try forms

Callers that wait for the same get turns by their weights and the bytes of their bodies.

So a short chat stands behind no long text, and a caller with many bodies, long texts or slow grammars waits for itself.
A short body whose form is tried has given its turn back: a trial may take seconds, and those behind it wait for all.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TypeAlias, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.access.shared_bound import SharedBound
from alignedserve.gateway.http.middleware import caller_of
from alignedserve.gateway.openai.errors import HANGS_UP, ApiError, ClientGone, no_room
from alignedserve.gateway.openai.strict import LARGE_BYTES
from alignedserve.shell.bounded_threads import BoundedThreads

BODIES_AT_ONCE = 32  # bodies of the largest size that may be held together, by all callers
# An upload of a file may take FILE_S, and more by the time that its bytes so far take at this rate.
FILE_S, FILE_BYTES_PER_S = 30.0, 32 << 10


class Bodies:
    """The bodies that are held in memory until they have become requests."""

    def __init__(self, limit_bytes: Callable[[], int], limit_s: float) -> None:
        """The limit of bytes may change; each body has that of its beginning."""
        self._limit_bytes, self._limit_s = limit_bytes, limit_s
        self._held_bytes = SharedBound()

    @asynccontextmanager
    async def read(self, http: HttpRequest) -> AsyncIterator[bytearray]:
        """Give the body of JSON, which counts as held inside the block; raise as soon as it is known to be too large.

        A page may send any other type to every server, and JSON only where that server lets it (CORS)."""
        check_encoding(http)
        content_type = http.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            message = f"send JSON with the header Content-Type: application/json, not {content_type!r:.80}"
            raise ApiError(415, message, code="unsupported_content_type")
        declared, limit_bytes = http.headers.get("content-length", ""), self._limit_bytes()
        if declared.isdigit() and (len(declared) > 18 or int(declared) > limit_bytes):
            raise _too_large(limit_bytes)
        body, caller = bytearray(), caller_of(http)
        try:
            await asyncio.wait_for(self._read(http, caller, body, limit_bytes), self._limit_s)
            yield body
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {self._limit_s:g} s"
            raise ApiError(408, message, code="request_timeout", headers=HANGS_UP) from None
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self._held_bytes.give(caller, len(body))

    async def _read(self, http: HttpRequest, caller: Caller, body: bytearray, limit_bytes: int) -> None:
        most = BODIES_AT_ONCE * limit_bytes
        async for part in http.stream():
            if len(body) + len(part) > limit_bytes:
                raise _too_large(limit_bytes)
            if not self._held_bytes.take(caller, len(part), most):
                raise no_room(caller, "bytes of bodies")
            body += part


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit_bytes} bytes", code="request_too_large")


async def parts_of_file(http: HttpRequest) -> AsyncIterator[bytes]:
    """Yield the parts of a body of any size as they arrive; only the time of waiting for the client is limited."""
    check_encoding(http)
    loop, waited_s, num_bytes = asyncio.get_running_loop(), 0.0, 0
    try:
        async with aclosing(http.stream()) as parts:
            while True:
                began_at = loop.time()
                left_s = FILE_S + num_bytes / FILE_BYTES_PER_S - waited_s
                part = await asyncio.wait_for(anext(parts, None), left_s)
                if part is None:
                    return
                waited_s += loop.time() - began_at
                num_bytes += len(part)
                yield part
    except asyncio.TimeoutError:
        message = f"the file arrived too slowly: fewer than {FILE_BYTES_PER_S} bytes/s"
        raise ApiError(408, message, param="file", code="request_timeout", headers=HANGS_UP) from None
    except ClientDisconnect:
        raise ClientGone from None


def check_encoding(http: HttpRequest) -> None:
    """Raise if the body is compressed: it could unpack to any size, so it is not unpacked."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = "the body must not be compressed: send it without Content-Encoding"
        raise ApiError(415, message, code="unsupported_encoding")


LONG_BYTES = 8 << 10  # a body above this may hold a text that takes five milliseconds to tokenise, and more
SHORT_AT_ONCE, LONG_AT_ONCE = 32, 8  # bodies that may be parsed at once, since a parsed body takes 25 times its memory
_LONG_OF_ONE = 2  # one that is tokenised, and one that waits for its turn at that
_TOKENISERS = 2  # threads; the library releases Python's lock while it works
_FORMERS = 4  # threads, which wait for the process that tries grammars: chats without a form do not; long bodies have 1

T = TypeVar("T")
_Waiting: TypeAlias = "tuple[float, asyncio.Future[None]]"  # when a turn is due, by the clock; done once it is given


class FairTurns:
    """Turns at something that callers share by weight, as many at once as there is room for.

    A turn costs 1, and 1 for each KiB of its body. A caller's next turn is due cost / weight after its last one
    (start-time fair queueing, a virtual clock): of those that wait, the turn that is due first comes next. For example,
    with weights 3 and 1 and many equal bodies that wait, of four turns three are of the first caller; where one waits
    with bodies of 4 MiB and another with bodies of 9 KiB, the second has 410 turns for one. A caller that comes later
    starts at the clock, so that it has neither saved up turns nor any to make up for."""

    def __init__(self, most: int, of_one: int | None = None) -> None:
        """Give `most` turns at once, `of_one` of them to a caller."""
        self._num_free, self._of_one = most, of_one or most
        self._held: Counter[str] = Counter()  # by caller
        self._waiting: dict[str, deque[_Waiting]] = {}  # by caller
        self._next_due: dict[str, float] = {}
        self._clock = 0.0  # when the last turn that was given was due

    @asynccontextmanager
    async def turn(self, caller: Caller, num_bytes: int = 0) -> AsyncIterator[None]:
        """Hold a turn of the caller's, for a body of this length."""
        own, cost = self._waiting.setdefault(caller.id, deque()), (1 + num_bytes / 1024) / caller.weight
        due = max(self._clock, self._next_due.get(caller.id, 0.0))
        self._next_due[caller.id] = due + cost
        mine = due, asyncio.get_running_loop().create_future()
        own.append(mine)
        self._give()
        try:
            await mine[1]
            yield
        finally:
            if mine[1].cancelled():
                self._forget(caller.id, mine)
                self._next_due[caller.id] = self._next_due.get(caller.id, 0.0) - cost
            else:
                self._held[caller.id] -= 1
                self._num_free += 1
            self._give()

    def _give(self) -> None:
        """Give the turns that are free."""
        while self._num_free:
            waiting = self._waiting.items()
            may_have = [(own[0][0], caller) for caller, own in waiting if self._held[caller] < self._of_one]
            if not may_have:
                break
            due, caller = min(may_have)
            _, given = mine = self._waiting[caller][0]
            self._forget(caller, mine)
            if not given.done():  # else its client has left just now
                self._held[caller] += 1
                self._num_free -= 1
                self._clock = max(self._clock, due)
                given.set_result(None)
        if not self._waiting and not +self._held:
            self._held.clear()
            self._next_due.clear()

    def _forget(self, caller: str, turn: _Waiting) -> None:
        if (own := self._waiting.get(caller)) is not None and turn in own:
            own.remove(turn)
            if not own:
                del self._waiting[caller]


class TurnThreads:
    """Threads that callers have by turns, each one at a time."""

    def __init__(self, number: int, name: str, times: int = 1) -> None:
        self._turns, self._threads = FairTurns(number, of_one=1), BoundedThreads(number, name, times)

    async def do(self, caller: Caller, num_bytes: int, work: Callable[[], T]) -> T:
        async with self._turns.turn(caller, num_bytes):
            return await self._threads.do(work)


class BodyTurns:
    def __init__(self) -> None:
        self._short = FairTurns(SHORT_AT_ONCE, of_one=SHORT_AT_ONCE // 2)
        self._long, self._large = FairTurns(LONG_AT_ONCE, of_one=_LONG_OF_ONE), FairTurns(1)
        self._texts, self._long_texts = TurnThreads(_TOKENISERS, "tokenise"), TurnThreads(1, "long")
        # Each trial has a limit of its own, and may wait for those of the other threads.
        self._forms, self._long_forms = (TurnThreads(number, "form", times=5) for number in (_FORMERS, 1))

    @asynccontextmanager
    async def turn(self, caller: Caller, num_bytes: int) -> AsyncIterator[AsyncExitStack]:
        """Hold a turn with a body of this length, from before it is parsed until it has become requests, or until what
        is given here is closed."""
        async with AsyncExitStack() as held:
            turns = self._long if num_bytes > LONG_BYTES else self._short
            await held.enter_async_context(turns.turn(caller, num_bytes))
            if num_bytes > LARGE_BYTES:
                await held.enter_async_context(self._large.turn(caller, num_bytes))
            yield held

    async def try_form(self, caller: Caller, num_bytes: int, work: Callable[[], T], turn: AsyncExitStack) -> T:
        """Do work that tries a form in a thread.

        A short body first gives its turn back. A long one keeps it, since few may be parsed at once."""
        if num_bytes > LONG_BYTES:
            return await self._long_forms.do(caller, num_bytes, work)
        await turn.aclose()
        return await self._forms.do(caller, num_bytes, work)

    async def do(self, caller: Caller, num_bytes: int, work: Callable[[], T]) -> T:
        """Do work on the texts of a body of this length in a thread."""
        return await (self._long_texts if num_bytes > LONG_BYTES else self._texts).do(caller, num_bytes, work)
