"""Answer a body by what its pieces amount to: as a stream of named events, or whole.

A *teller* makes the events of an answer. Whoever does not stream gets its `tree` once it has told all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeAlias

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.openai.errors import ApiError, api_error
from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.gateway.openai.writing import PART_BYTES, joined
from alignedserve.gateway.starting import Started
from alignedserve.gateway.streaming import EventStream, event, event_parts, json_response, unless_gone

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
            headers = {**self._headers, **self._generation.headers}
            return json_response(self._teller.tree, headers, self._stalled_client_s)
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
                for part in _parts(events):
                    yield part
                    if len(part) >= PART_BYTES:
                        await asyncio.sleep(0)  # the event loop turns
        except Exception as error:
            if not isinstance(error, AlignedServeError):
                _log.exception("a stream failed")
            self._meter.finish("error")
            for part in _parts(self._teller.fail(api_error(error))):
                yield part

    async def _events(self) -> AsyncGenerator[list[Event], None]:
        """Yield the events of each piece together."""
        yield self._teller.begin()
        async for _, piece in self._generation.pieces():
            if events := await self._teller.feed(piece):
                yield events
                self._meter.count_write(0)  # the stream asks for the next events after it has written these


def _parts(events: Sequence[Event]) -> Iterator[bytes]:
    """Yield the bytes of events; all but deltas may hold the whole answer."""
    return joined(chain.from_iterable(map(_written, events)))


def _written(told: Event) -> Iterator[bytes]:
    yield f"event: {told['type']}\n".encode()
    if told["type"].endswith("delta"):
        yield event(told)
    else:
        yield from event_parts(told)
