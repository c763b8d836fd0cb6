"""Answers on their way to a client that may leave at any time.

A client that leaves has its request cancelled. Starlette tells of it only where a server's version makes
it, so here every wait for tokens, and every stream, runs against the connection's own end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.generation import Generation
from alignedserve.gateway.http.metrics import Meter
from alignedserve.gateway.openai.errors import ClientGone, api_error
from alignedserve.gateway.openai.reading import Piece, joined
from alignedserve.gateway.openai.shapes import Shape
from alignedserve.gateway.sse import DONE, Chunks, event

_log = logging.getLogger("alignedserve.gateway")

T = TypeVar("T")


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


class WatchedStream(Response):
    """Pieces on their way to a client that may leave, or stop reading: either ends it."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], stalled_client_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._pieces, self._stalled_client_s = pieces, stalled_client_s

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        watch = _Watch(self._stalled_client_s)
        try:
            await self._send_watched(watch, send)
        except asyncio.CancelledError:
            if watch.has_struck:
                raise ClientGone from None
            raise
        finally:
            watch.stop()

    async def _send_watched(self, watch: _Watch, send: Send) -> None:
        async with aclosing(self._pieces):
            await watch.over(send({"type": "http.response.start", "status": 200, "headers": self.raw_headers}))
            async for written in self._pieces:
                await watch.over(send({"type": "http.response.body", "body": written, "more_body": True}))
            await watch.over(send({"type": "http.response.body", "body": b"", "more_body": False}))


class EventStream(WatchedStream):
    """Server-sent events of one generation, which is closed however the stream ends."""

    def __init__(self, generation: Generation, shape: Shape, meter: Meter, stalled_client_s: float) -> None:
        headers = {"Cache-Control": "no-cache", **shape.headers}
        written = events(generation, shape, meter)
        super().__init__(written, stalled_client_s, media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._generation.close()


class _Watch:
    """Cancels the task that made it, once a write of its takes longer than the limit.

    One timer for all writes of a stream, which looks again when the write that is under way could be over its time: a
    timeout for each would be a quarter of what a token costs.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._since: float | None = None  # when the write that is under way began
        self._timer = self._loop.call_later(limit_s, self._look)
        self.has_struck = False

    async def over(self, write: Awaitable[None]) -> None:
        self._since = self._loop.time()
        await write
        self._since = None

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._limit_s if self._since is None else self._since + self._limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self.has_struck = True
        assert self._task is not None
        self._task.cancel()


async def events(generation: Generation, shape: Shape, meter: Meter) -> AsyncGenerator[bytes, None]:
    """A fault after the stream has begun is its last event but one: the status has been sent."""
    try:
        async for written in _events(generation, shape, meter):
            yield written
    except Exception as error:
        if not isinstance(error, AlignedServeError):
            _log.exception("a stream broke")
        meter.ended("error")
        yield event(api_error(error).body)
    yield DONE


async def _events(generation: Generation, shape: Shape, meter: Meter) -> AsyncIterator[bytes]:
    for opening in shape.openings():
        yield event(opening)
    chunks = Chunks(shape)
    async for choice, piece in generation.pieces():
        if (written := chunks.event(choice, piece)) is not None:
            yield written
            meter.written(choice)  # the stream asks for the next event once this one is written
    if shape.with_usage:
        yield event(shape.usage_chunk())


async def whole(generation: Generation, shape: Shape, meter: Meter) -> dict[str, Any]:
    pieces: dict[int, list[Piece]] = {}
    await generation.begin()
    async for choice, piece in generation.pieces():
        pieces.setdefault(choice, []).append(piece)
        meter.written(choice)
    return shape.whole([joined(pieces[choice]) for choice in sorted(pieces)])
