"""Answers on their way to a client that may leave at any time.

A client that leaves has its request cancelled. Starlette tells of it only where a server's version makes
it, so here every wait for tokens, and every stream, runs against the connection's own end.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.errors import ClientGone, api_error
from alignedserve.gateway.generation import Generation
from alignedserve.gateway.metrics import Meter
from alignedserve.gateway.reading import Piece, joined
from alignedserve.gateway.shapes import Shape

_log = logging.getLogger("alignedserve.gateway")

T = TypeVar("T")
DONE = "data: [DONE]\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns; once the client has gone it is cancelled, and ClientGone raised.

    For a request whose body has been read. A task's cancellation comes once, so that what the work
    does to clean up may wait; a cancel scope's would come at every await.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of one generation, which is closed however the stream ends."""

    def __init__(self, generation: Generation, shape: Shape, meter: Meter, stalled_client_s: float) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", **shape.headers})
        del self.headers["content-length"]
        self._generation = generation
        self._events = events(generation, shape, meter)
        self._stalled_client_s = stalled_client_s

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        finally:
            await self._generation.close()

    async def _send_all(self, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events):
            async for event in self._events:
                body = {"type": "http.response.body", "body": event.encode(), "more_body": True}
                await self._send(send, body)
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        with anyio.move_on_after(self._stalled_client_s) as scope:
            await send(message)
        if scope.cancelled_caught:
            raise ClientGone


async def events(generation: Generation, shape: Shape, meter: Meter) -> AsyncGenerator[str, None]:
    """A fault after the stream has begun is its last event but one: the status has been sent."""
    try:
        async for event in _events(generation, shape, meter):
            yield event
    except Exception as error:
        if not isinstance(error, AlignedServeError):
            _log.exception("a stream broke")
        meter.ended("error")
        yield _event(api_error(error).body)
    yield DONE


async def _events(generation: Generation, shape: Shape, meter: Meter) -> AsyncIterator[str]:
    for opening in shape.openings():
        yield _event(opening)
    async for choice, piece in generation.pieces():
        if (chunk := shape.chunk(choice, piece)) is not None:
            yield _event(chunk)
            meter.written(choice)  # the stream asks for the next event once this one is written
    if shape.with_usage:
        yield _event(shape.usage_chunk())


def _event(body: dict[str, Any]) -> str:
    """In ASCII: some clients split lines at U+2028 or U+0085, which JSON otherwise leaves as they are."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


async def whole(generation: Generation, shape: Shape, meter: Meter) -> dict[str, Any]:
    pieces: dict[int, list[Piece]] = {}
    await generation.begin()
    async for choice, piece in generation.pieces():
        pieces.setdefault(choice, []).append(piece)
        meter.written(choice)
    return shape.whole([joined(pieces[choice]) for choice in sorted(pieces)])
