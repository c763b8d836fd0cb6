"""Send answers to clients that may leave at any time.

When a client leaves, its requests are cancelled. Whether Starlette reports that depends on the server's version. So
here every wait for tokens and every stream is raced against the end of its connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from itertools import chain
from json.encoder import encode_basestring_ascii
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from alignedserve.gateway.openai.errors import ClientGone
from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.gateway.openai.shapes import AnswerShape
from alignedserve.gateway.openai.writing import ascii_json, json_parts
from alignedserve.owner.client import InLine
from alignedserve.shell.event_loop import end_tasks

DONE = b"data: [DONE]\n\n"
BLOCKED_S = 2.0  # that a client may read nothing before its requests are paused
# These stand for the text and the token where a chunk is split; no client can have sent them.
_MARK, _MARK_TOKEN = secrets.token_hex(16), (1 << 62) + secrets.randbits(62)


def event(body: dict[str, Any]) -> bytes:
    """Return the body as an event in ASCII: some clients split lines at U+2028 or U+0085, which JSON may contain."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


def event_parts(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield a large event in parts."""
    yield b"data: "
    yield from (ascii_json(part).encode() for part in json_parts(body))
    yield b"\n\n"


def waiting(place: InLine) -> bytes:
    """Return a comment, which clients skip: it tells people who look their place, and proxies that the stream lives."""
    return f": {place.num_before} before you, about {math.ceil(place.seconds)} s\n\n".encode()


class _ChunkLike:
    """A chunk that has marks in the places of its text and, where the client asked for it, of its token."""

    def __init__(self, marked: str) -> None:
        self._before_ids, mark, after = marked.partition(str(_MARK_TOKEN))
        self._around = (after if mark else marked).split(_MARK)
        self._has_ids = bool(mark)

    def filled(self, text: str, tokens: tuple[int, ...]) -> str:
        written = encode_basestring_ascii(text)[1:-1].join(self._around)
        return f"{self._before_ids}{','.join(map(str, tokens))}{written}" if self._has_ids else written


class Chunks:
    """Encodes the chunks of one answer as server-sent events.

    Most chunks differ from the chunk before in their text only, or in their reasoning only, and in the ids of their
    tokens where the client asked for these. So what is around them in a choice's first such chunk is kept, and of each
    later chunk only the text and the ids are encoded.
    """

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._like_reasoning: dict[int, _ChunkLike] = {}  # choice -> how its chunks with nothing but reasoning look
        self._like_text: dict[int, _ChunkLike] = {}

    def event(self, number: int, piece: AnswerPiece) -> bytes | None:
        """Return the event of a piece, or None if the piece needs no chunk."""
        text, kept = piece.text or piece.reasoning, self._like_text if piece.text else self._like_reasoning
        if piece.calls or piece.finish is not None or not text or (piece.text and piece.reasoning):
            return self._whole(number, piece)
        if (like := kept.get(number)) is not None:
            self._shape.count(number, piece)
            return like.filled(text, piece.tokens).encode()
        written, tokens = self._whole(number, piece), (_MARK_TOKEN,)
        marked = AnswerPiece(_MARK, tokens, None) if piece.text else AnswerPiece("", tokens, None, reasoning=_MARK)
        if (chunk := self._shape.chunk_like(number, marked)) is not None:
            kept[number] = _ChunkLike(event(chunk).decode())
        return written

    def _whole(self, number: int, piece: AnswerPiece) -> bytes | None:
        chunk = self._shape.chunk(number, piece)
        return None if chunk is None else event(chunk)


_log = logging.getLogger("alignedserve.gateway")

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work; if the client leaves first, cancel the work and raise ClientGone.

    The request's body must have been read. The work is a task, not a cancel scope: a task is cancelled once, so its
    clean-up may await; a cancel scope would cancel every await of the clean-up too.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await end_tasks(working, leaving)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class WatchedStream(Response):
    """A streamed response that ends when its client leaves, or reads nothing for `stalled_client_s`."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        stalled_client_s: float,
        on_blocked: Callable[[], None] | None = None,
        on_end: Callable[[], Awaitable[None]] | None = None,
        num_bytes: int | None = None,
        **options: Any,
    ) -> None:
        """`on_blocked` is called when its client has read nothing for BLOCKED_S, and `on_end` however it ends.
        `num_bytes` is its length, where that is known."""
        super().__init__(**options)
        if num_bytes is None:
            del self.headers["content-length"]
        else:
            self.headers["content-length"] = str(num_bytes)
        self._pieces, self._stalled_client_s = pieces, stalled_client_s
        self._on_blocked, self._on_end = on_blocked, on_end

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        finally:
            if self._on_end is not None:
                await self._on_end()

    async def _send_all(self, send: Send) -> None:
        watch = _WriteWatch(self._stalled_client_s, self._on_blocked)
        try:
            async with aclosing(self._pieces):
                await watch.run(send({"type": "http.response.start", "status": 200, "headers": self.raw_headers}))
                async for piece in self._pieces:
                    await watch.run(send({"type": "http.response.body", "body": piece, "more_body": True}))
                await watch.run(send({"type": "http.response.body", "body": b"", "more_body": False}))
        except asyncio.CancelledError:
            if watch.has_expired:
                raise ClientGone from None
            raise
        finally:
            watch.stop()


def json_response(tree: Any, headers: Mapping[str, str], stalled_client_s: float) -> Response:
    """Return a tree as JSON: in parts, as it is written, where it is large."""
    return parts_response(json_parts(tree), headers, stalled_client_s)


def parts_response(parts: Iterator[bytes], headers: Mapping[str, str], stalled_client_s: float) -> Response:
    """Return JSON that is already in parts."""
    first = next(parts)
    if (second := next(parts, None)) is None:
        return Response(first, media_type="application/json", headers=headers)
    pieces = in_turns(chain((first, second), parts))
    return WatchedStream(pieces, stalled_client_s, media_type="application/json", headers=headers)


async def in_turns(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the parts, and let the event loop turn after each."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


class _WriteWatch:
    """Cancels the task that made it if one of its writes takes longer than the limit. Long before, calls `on_blocked`.

    All writes of a stream share one timer, which fires when the current write may be over its limit: a timeout for
    each write would be a quarter of the cost of a token.
    """

    def __init__(self, limit_s: float, on_blocked: Callable[[], None] | None) -> None:
        self._limit_s, self._on_blocked = limit_s, on_blocked
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._began_at: float | None = None  # when the current write began
        self._is_blocked = False  # whether the current write was told to be
        self._timer = self._loop.call_later(self._next_s, self._check)
        self.has_expired = False

    async def run(self, write: Awaitable[None]) -> None:
        self._began_at = self._loop.time()
        await write
        self._began_at, self._is_blocked = None, False

    def stop(self) -> None:
        self._timer.cancel()

    @property
    def _next_s(self) -> float:
        """Return how long a write may take until something is to be done."""
        return self._limit_s if self._is_blocked or self._on_blocked is None else min(BLOCKED_S, self._limit_s)

    def _check(self) -> None:
        took_s = 0.0 if self._began_at is None else self._loop.time() - self._began_at
        if took_s >= self._limit_s:
            self.has_expired = True
            assert self._task is not None
            self._task.cancel()
            return
        if took_s >= self._next_s and self._on_blocked is not None:
            self._is_blocked = True
            self._on_blocked()
        self._timer = self._loop.call_later(self._next_s - took_s, self._check)
