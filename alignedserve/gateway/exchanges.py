"""Answer a body by what its pieces amount to: as a stream of named events, or whole.

A *teller* makes the events of an answer. Whoever does not stream gets its `tree` once it has told all of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol, TypeAlias

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.openai.errors import ApiError, api_error
from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.gateway.starting import Started
from alignedserve.gateway.streaming import EventStream, unless_gone

_log = logging.getLogger("alignedserve.gateway")

Event: TypeAlias = dict[str, Any]


class Teller(Protocol):
    @property
    def tree(self) -> dict[str, Any]:
        """Return the answer so far."""

    def begin(self) -> list[Event]:
        """Return the events before the first piece."""

    async def feed(self, piece: AnswerPiece) -> list[Event]:
        """Return the events of a piece; those of the piece with a finish are the last."""

    def fail(self, error: ApiError) -> list[Event]:
        """Return the last events of an answer that an error ends."""


class Exchange:
    """An answer that is being made while its client waits for it."""

    def __init__(self, started: Started, teller: Teller, headers: Mapping[str, str], stalled_client_s: float) -> None:
        self._generation, self._meter = started.generation, started.meter
        self._teller, self._headers, self._stalled_client_s = teller, headers, stalled_client_s

    async def whole(self, http: HttpRequest) -> Response:
        try:
            await unless_gone(http.receive, self._read_all())
            return JSONResponse(self._teller.tree, headers={**self._headers, **self._generation.headers})
        finally:
            await self._generation.close()

    async def stream(self, http: HttpRequest) -> Response:
        return await EventStream.begin(http, self._generation, self._written(), self._headers, self._stalled_client_s)

    async def _read_all(self) -> None:
        await self._generation.begin()
        async for _ in self._events():
            pass

    async def _written(self) -> AsyncGenerator[bytes, None]:
        """Yield all events of a stream; an error is an event too, since the HTTP status has already been sent."""
        try:
            async for events in self._events():
                yield b"".join(map(written, events))
        except Exception as error:
            if not isinstance(error, AlignedServeError):
                _log.exception("a stream failed")
            self._meter.finish("error")
            yield b"".join(map(written, self._teller.fail(api_error(error))))

    async def _events(self) -> AsyncGenerator[list[Event], None]:
        """Yield the events of each piece together."""
        yield self._teller.begin()
        async for _, piece in self._generation.pieces():
            if events := await self._teller.feed(piece):
                yield events
                self._meter.count_write(0)  # the stream asks for the next events after it has written these


def written(event: Event) -> bytes:
    """Return an event as a server-sent event in ASCII, since some clients split lines at U+2028 or U+0085."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
