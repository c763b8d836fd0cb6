"""Answer a body while its client waits: as a stream of events, or whole.

ChatExchange   OpenAI's chat and text completions: chunks of several choices, one beside another
NamedEventExchange   interfaces with named events, which an ItemAnswer makes: Responses and Messages

llama_cpp.py has one more, for that server's own routes.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.generation import Numbered
from alignedserve.gateway.openai.errors import ApiError, api_error
from alignedserve.gateway.openai.itemised import Event, ItemAnswer
from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.gateway.openai.shapes import AnswerShape
from alignedserve.gateway.openai.streaming import (
    DONE,
    Chunks,
    WatchedStream,
    event,
    event_parts,
    in_turns,
    json_response,
    unless_gone,
    waiting,
)
from alignedserve.gateway.openai.strict import Body
from alignedserve.gateway.openai.writing import PART_BYTES, joined
from alignedserve.gateway.starting import StartedRequests, Starter
from alignedserve.owner.client import InLine
from alignedserve.shell.event_loop import ENDS

_log = logging.getLogger("alignedserve.gateway")
Told = TypeVar("Told")


class Exchange(ABC, Generic[Told]):
    """An answer that is being made while its client waits for it."""

    def __init__(self, started: StartedRequests, is_streamed: bool, ignored: list[str], told: Told) -> None:
        """`ignored` are the fields of the body that are set and change nothing; a header names them. `told` makes the
        answer of pieces."""
        self._generation, self._meter, self._stalled_s = started.generation, started.meter, started.stalled_client_s
        self._is_streamed, self._told = is_streamed, told
        self._headers = {**ignored_header(ignored), **started.headers}

    async def answer(self, http: HttpRequest) -> Response:
        """Return the answer when its first token has come: until then a refusal is answered by an HTTP status."""
        generation, is_sent = self._generation, False
        try:
            if not self._is_streamed:
                tree = await unless_gone(http.receive, self._whole())
                return json_response(tree, {**self._headers, **generation.headers}, self._stalled_s)
            await unless_gone(http.receive, generation.begin())
            is_sent = True
        finally:
            if not is_sent:
                await generation.close()
        # While its client does not read, the generation is paused: it takes no worker's time.
        callbacks, kind = (generation.pause, generation.close), "text/event-stream"
        headers = {"Cache-Control": "no-cache", **self._headers, **generation.headers}
        return WatchedStream(self._stream(), self._stalled_s, *callbacks, media_type=kind, headers=headers)

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """Yield all events of a stream; an error is an event too, since the HTTP status has already been sent."""
        try:
            async for part in self._events():
                yield part
        except ENDS:
            raise
        except BaseException as error:
            if not isinstance(error, AlignedServeError):
                _log.exception("a stream failed")
            self._meter.finish("error", told := api_error(error))
            for part in self._failed(told):
                yield part
        if self._end:
            yield self._end

    _end = b""  # of a stream

    @abstractmethod
    def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the whole stream."""

    @abstractmethod
    def _failed(self, error: ApiError) -> Iterator[bytes]:
        """Yield the last events of an answer that an error ends."""

    @abstractmethod
    async def _whole(self) -> dict[str, Any]:
        """Return the answer of all requests, when the last has ended."""


class ChatExchange(Exchange[AnswerShape]):
    _end = DONE

    async def _events(self) -> AsyncGenerator[bytes, None]:
        shape, meter = self._told, self._meter
        for opening in shape.openings():
            yield event(opening)
        chunks = Chunks(shape)
        async for choice, piece in self._pieces():
            if isinstance(piece, InLine):
                yield waiting(piece)
            elif piece.prompt_logprobs and (chunk := shape.chunk(choice, piece)) is not None:
                async for part in in_turns(event_parts(chunk)):
                    yield part
                meter.count_write(choice)
            elif (written := chunks.event(choice, piece)) is not None:
                yield written
                meter.count_write(choice)  # the stream asks for the next event after it has written this one
        if shape.options.include_usage:
            timing = meter.timing_usage() if shape.options.include_timing else {}
            yield event(shape.usage_chunk(timing))

    def _pieces(self) -> AsyncIterator[Numbered]:
        return self._generation.pieces()

    def _failed(self, error: ApiError) -> Iterator[bytes]:
        yield event(error.body)

    async def _whole(self) -> dict[str, Any]:
        await self._generation.begin()
        async for choice, piece in self._pieces():
            if isinstance(piece, InLine):
                continue
            for _ in self._told.add(choice, piece):
                await asyncio.sleep(0)  # the event loop turns
            self._meter.count_write(choice)
        return self._told.whole()


class NamedEventExchange(Exchange[ItemAnswer]):
    async def _events(self) -> AsyncGenerator[bytes, None]:
        for part in _parts(self._told.begin()):
            yield part
        async for _, piece in self._generation.pieces():
            if isinstance(piece, InLine):
                yield waiting(piece)
            elif events := await self._feed(piece):
                for part in _parts(events):
                    yield part
                    if len(part) >= PART_BYTES:
                        await asyncio.sleep(0)  # the event loop turns
                self._meter.count_write(0)  # the stream asks for the next events after it has written these

    def _failed(self, error: ApiError) -> Iterator[bytes]:
        return _parts(self._told.fail(error))

    async def _whole(self) -> dict[str, Any]:
        await self._generation.begin()
        self._told.begin()
        async for _, piece in self._generation.pieces():
            if not isinstance(piece, InLine) and await self._feed(piece):
                self._meter.count_write(0)
        return self._told.tree

    async def _feed(self, piece: AnswerPiece) -> list[Event]:
        events = self._told.feed(piece)
        if piece.finish:
            await self._told.keep()
        return events


def ignored_header(fields: list[str]) -> dict[str, str]:
    """Return the header that names the fields of a body that are set and change nothing."""
    return {"x-ignored-fields": ", ".join(fields)} if fields else {}


async def answer_body(
    starter: Starter,
    kind: type[Body],
    begin: Callable[[HttpRequest, Body], Awaitable[Exchange[Any] | Response]],
    http: HttpRequest,
) -> Response:
    """Answer a body by what it begins. Its memory is free while its requests run."""
    starter.check_ready()
    async with starter.read(http, kind) as body:
        begun = await begin(http, body)
        del body
    return begun if isinstance(begun, Response) else await begun.answer(http)


def _parts(events: list[Event]) -> Iterator[bytes]:
    """Yield the bytes of events; all but deltas may hold the whole answer."""
    return joined(chain.from_iterable(map(_written, events)))


def _written(told: Event) -> Iterator[bytes]:
    yield f"event: {told['type']}\n".encode()
    if told["type"].endswith("delta"):
        yield event(told)
    else:
        yield from event_parts(told)
