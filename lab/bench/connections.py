"""Connections to a server, kept open from request to request, which note the time as soon as bytes are there.

The parser is in C and an event of a stream is decoded into few objects, so that a client that reads a thousand tokens a
second takes a small part of a core: what it measures is the server.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httptools

from alignedserve.http_client import trust
from alignedserve.lab.bench.answer import StreamedAnswer, StreamReader

Clock = Callable[[], float]


@dataclass(frozen=True)
class Address:
    """The address of an API, and the headers that every request to it carries."""

    host: str
    port: int
    base: str  # path of the API
    tls: ssl.SSLContext | None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str, api_key: str | None, ca: Path | None = None) -> Address:
        parts = urlsplit(url)
        tls = trust(ca) if parts.scheme == "https" else None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), parts.path.rstrip("/"), tls, headers)

    def post(self, path: str, body: bytes) -> bytes:
        """Return a request as it is sent."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"POST {self.base}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Content-Type: application/json"]
        lines += [*(f"{name}: {value}" for name, value in self.headers.items()), f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


class Connection(asyncio.Protocol):
    """A connection: one request and answer at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._reader = StreamReader()
        self._parser = httptools.HttpResponseParser(self)
        self._ended: asyncio.Future[str | None] | None = None
        self._now = 0.0
        self.last_at = clock()  # when bytes came or went last
        self.is_open = self._stays = False

    async def ask(self, request: bytes, reader: StreamReader) -> str | None:
        """Send a request and read the answer; return what broke the answer off, if anything did."""
        assert self._transport is not None
        self._reader, self._stays, self.last_at = reader, False, self._clock()
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._ended = ended
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        return await ended

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the answer so far."""
        return self._reader.num_tokens

    @property
    def is_free(self) -> bool:
        """Return whether another request may follow on this connection."""
        return self.is_open and self._stays

    def close(self, why: str) -> None:
        self._end(why)
        if self._transport is not None:
            self._transport.abort()

    # --- What asyncio says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self._now = self.last_at = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(f"the server sent no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end("the server closed the connection" if error is None else f"the connection broke: {error}")

    # --- What the parser says

    def on_headers_complete(self) -> None:
        self._reader.begin(self._parser.get_status_code(), self._now)

    def on_body(self, body: bytes) -> None:
        self._reader.read(body, self._now)

    def on_message_complete(self) -> None:
        self._stays = self._parser.should_keep_alive()
        self._end(None)

    def _end(self, why: str | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(why)


class Connections:
    """All connections to one server."""

    def __init__(self, address: Address, clock: Clock, connect_s: float) -> None:
        self._address, self._clock, self._connect_s = address, clock, connect_s
        self._free = list[Connection]()
        self._busy = dict[str, Connection]()  # by request
        self._left = set[str]()  # requests without a connection when their client left
        self._num_read = 0  # tokens of answers that have ended

    async def ask(self, name: str, path: str, body: bytes) -> StreamedAnswer:
        """Ask, and return the answer, whatever it is."""
        reader, broke = StreamReader(), None
        request = self._address.post(path, body)
        while (broke := await self._try(name, request, reader)) is _AGAIN:
            pass
        self._num_read += reader.num_tokens
        return reader.answer(reader.read_at if broke is None else self._clock(), broke)

    @property
    def num_tokens(self) -> int:
        """Return the tokens that were read so far."""
        return self._num_read + sum(connection.num_tokens for connection in self._busy.values())

    async def _try(self, name: str, request: bytes, reader: StreamReader) -> str | None:
        """Ask on a free or a new connection; _AGAIN where the server closed a free one before it read the request."""
        free = self._take()
        try:
            connection = free or await self._connect()
        except (OSError, asyncio.TimeoutError) as error:
            reason = "no answer" if isinstance(error, asyncio.TimeoutError) else error
            return f"no connection to {self._address.host}:{self._address.port}: {reason}"
        if name in self._left:
            connection.close("")
            return _LEFT
        self._busy[name] = connection
        broke = await connection.ask(request, reader)
        is_left = self._busy.pop(name, None) is None
        if free is not None and broke is not None and not reader.is_begun and not is_left:
            return _AGAIN
        if connection.is_free:
            self._free.append(connection)
        else:
            connection.close("")
        return broke

    def hang_up(self, name: str, why: str) -> None:
        connection = self._busy.pop(name, None)
        if connection is None:
            self._left.add(name)
        else:
            connection.close(why)

    def silent(self, since: float) -> list[str]:
        """Return the requests on connections that moved no byte since that time."""
        return [name for name, connection in self._busy.items() if connection.last_at < since]

    def close(self) -> None:
        for connection in (*self._free, *self._busy.values()):
            connection.close("the test is over")

    def _take(self) -> Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop, address = asyncio.get_running_loop(), self._address
        opening = loop.create_connection(lambda: Connection(self._clock), address.host, address.port, ssl=address.tls)
        _, connection = await asyncio.wait_for(opening, self._connect_s)
        return connection


_AGAIN = "again"
_LEFT = "the client left"
