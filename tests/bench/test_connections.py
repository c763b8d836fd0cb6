"""Tests of connections to a server that closes them, is silent, or says what is no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter

import pytest

from alignedserve.lab.bench.answer import StreamedAnswer
from alignedserve.lab.bench.connections import Address, Connection, Connections

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
PART = b'data: {"choices": [{"text": "a"}]}\n\n'
WHOLE = HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(PIECE), PIECE)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def heard(reader: asyncio.StreamReader) -> bytes:
    """Return the head of the next request; its body is `{}`."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(2)
    return head


@asynccontextmanager
async def connected(serve: Serve) -> AsyncIterator[Connections]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connections = Connections(Address.parse(f"http://127.0.0.1:{port}/v1", "key"), perf_counter, 5.0)
    yield connections
    connections.close()
    server.close()


def test_a_connection_is_used_again_and_one_that_the_server_closed_is_replaced() -> None:
    """The server answers two requests on a connection; at a third it closes the connection without an answer."""
    numbers = list[int]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(3):
            head = await heard(reader)
            numbers.append(number)
            assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
            assert b"\r\nAuthorization: Bearer key\r\n" in head
            if number < 2:
                writer.write(WHOLE)
        writer.close()

    async def ask() -> list[StreamedAnswer]:
        async with connected(serve) as connections:
            return [await connections.ask(str(name), "/completions", b"{}") for name in range(4)]

    answers = asyncio.run(ask())
    assert [answer.failure for answer in answers] == [None] * 4
    assert [len(answer.token_at) for answer in answers] == [1] * 4
    assert numbers == [0, 1, 2, 0, 1], "the third request was sent again on a new connection"


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_request_may_be_given_up(is_begun: bool) -> None:
    async def ask() -> StreamedAnswer:
        waits = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await heard(reader)
            if is_begun:
                writer.write(HEAD + b"%x\r\n%b\r\n" % (len(PART), PART))
            waits.set()
            await reader.read()

        async with connected(serve) as connections:
            asked = asyncio.create_task(connections.ask("r", "/completions", b"{}"))
            await waits.wait()
            while is_begun and not connections.num_tokens:
                await asyncio.sleep(0)
            assert connections.silent(perf_counter()) == ["r"]
            connections.hang_up("r", "silent for 9 s")
            return await asked

    answer = asyncio.run(ask())
    assert answer.failure is not None
    assert answer.failure.kind == ("the answer broke off" if is_begun else "no answer")
    assert answer.failure.text == "silent for 9 s"
    assert len(answer.token_at) == is_begun


def test_a_connection_that_was_lost_is_not_open() -> None:
    connection = Connection(perf_counter)
    connection.connection_made(asyncio.Transport())
    assert connection.is_open
    connection.connection_lost(None)
    assert not connection.is_open


def test_what_is_no_http_is_broken() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heard(reader)
        writer.write(b"220 mail.example ESMTP\r\n")

    async def ask() -> StreamedAnswer:
        async with connected(serve) as connections:
            return await connections.ask("r", "/completions", b"{}")

    failure = asyncio.run(ask()).failure
    assert failure is not None
    assert failure.text.startswith("the server sent no HTTP")
