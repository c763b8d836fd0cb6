"""Tests of clients that are slow, greedy, broken or gone: each is disconnected, and the next is served as usual."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from typing import Any, cast

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from alignedserve.gateway.access.keys import KeyEntry, KeyRing, hash_key
from alignedserve.gateway.http.bodies import LONG_BYTES
from alignedserve.gateway.http.connections import MOST_HEAD_BYTES, MOST_HEADERS
from alignedserve.text.text_model import TextModel
from tests.conftest import examples
from tests.gateway.conftest import PATIENT_S, FakeOwner, Gateway
from tests.gateway.served import SOON_S, Served, read_all, served, until

BODY = json.dumps({"model": "demo", "prompt": "Hi", "max_tokens": 1}).encode()
STREAM = json.dumps({"model": "demo", "prompt": "Hi", "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
JSON = {"Content-Type": "application/json"}
MOST = 8


def whole(body: bytes, more: bytes = b"") -> bytes:
    return HEAD + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(text, FakeOwner((5,)), body_limit_bytes=100_000)


@pytest.fixture
def server(gateway: Gateway) -> Iterator[Served]:
    with served(gateway.app, most_connections=MOST) as server:
        yield server
        until(lambda: server.num_connections == 0)
        assert works(server)


@pytest.fixture
def hurried(server: Served) -> Iterator[Served]:
    """Yield a server with little patience; restore it afterwards, so that later tests may take as long as they need."""
    server.head_s = SOON_S
    yield server
    server.head_s = PATIENT_S


def works(server: Served) -> bool:
    return server.say(whole(BODY, b"Connection: close\r\n")).startswith(b"HTTP/1.1 200")


def error_in(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("sent", [whole(BODY, b"Connection: close\r\n"), b"\r\n", b"POST /v1/completions HT"])
def test_what_came_while_the_server_stood_still_is_read_before_a_connection_ends(hurried: Served, sent: bytes) -> None:
    """A request is answered; whoever sends no more than a beginning is disconnected all the same.

    A process that is stopped and goes on runs its timers before it reads: its wait for events ends without any."""
    with hurried.connect() as connection:
        until(lambda: hurried.num_connections == 1)
        (served_here,) = hurried.server.server_state.connections
        stopped = threading.Event()

        def stand_still() -> None:
            stopped.set()
            goes_on.wait()
            cast(Any, served_here).timeout_keep_alive_handler()

        goes_on = threading.Event()
        cast(Any, served_here).loop.call_soon_threadsafe(stand_still)
        stopped.wait()
        connection.sendall(sent)
        goes_on.set()
        assert read_all(connection).startswith(b"HTTP/1.1 200" if BODY in sent else b"")


@pytest.mark.parametrize("sent", [b"", b"POST", HEAD, HEAD + b"X-Slow: "])
def test_a_head_that_does_not_end_is_given_up(hurried: Served, sent: bytes) -> None:
    with hurried.connect() as connection, suppress(ConnectionError):
        connection.sendall(sent)
        assert read_all(connection) == b""


def test_each_byte_of_a_head_buys_no_time(hurried: Served) -> None:
    with hurried.connect() as connection, suppress(ConnectionError):
        for byte in itertools.islice(itertools.cycle(HEAD[:40]), 1000):
            connection.sendall(bytes([byte]))
            time.sleep(0.01)
        raise AssertionError("it has been listened to for 10 s")


def test_a_slow_body_is_given_up_with_a_reason_and_hung_up_on_at_once(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((5,)), body_limit_s=SOON_S)
    with served(gateway.app) as server, server.connect() as connection:
        server.head_s = 10 * PATIENT_S  # the end of the connection is not that of its patience
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
        assert error_in(read_all(connection), 408)["code"] == "request_timeout"


def test_a_body_that_nobody_asked_for_is_not_read_for_ever(hurried: Served) -> None:
    """The client goes on sending the body that it declared, although the answer has already been sent."""
    with hurried.connect() as connection, suppress(ConnectionError):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        for _ in range(1000):
            connection.sendall(b" ")
            time.sleep(0.01)
        raise AssertionError("it has been listened to for 10 s")


@pytest.mark.parametrize(
    "endless",
    [
        (b"GET /", b"a" * 1000),
        (HEAD + b"X-Long: ", b"a" * 1000),
        (HEAD, b"X-Many: a\r\n"),
        (HEAD, b"Cookie: " + b"a" * 1000 + b"\r\n"),
    ],
    ids=["line", "header", "headers", "long headers"],
)
def test_a_head_has_limits(server: Served, endless: tuple[bytes, bytes]) -> None:
    first, more = endless
    with server.connect() as connection:
        with suppress(ConnectionError):
            connection.sendall(first)
            for _ in range(50_000):
                connection.sendall(more)
        answer = b""
        with suppress(ConnectionError):
            answer = read_all(connection)
    assert not answer or error_in(answer, 431)["code"] == "headers_too_large"


@pytest.mark.parametrize(
    "head", [b"X-Many: a\r\n" * (MOST_HEADERS + 1), b"X-Long: " + b"a" * (MOST_HEAD_BYTES + 1) + b"\r\n"]
)
def test_a_head_over_its_limits_is_told_so(server: Served, head: bytes) -> None:
    assert error_in(server.say(HEAD + head + b"\r\n"), 431)["code"] == "headers_too_large"


@pytest.mark.parametrize("end", [b"1;", b"0\r\nX: "], ids=["a chunk's extensions", "trailers"])
def test_a_chunked_body_that_says_nothing_is_cut_off(server: Served, end: bytes) -> None:
    with server.connect() as connection, suppress(ConnectionError):
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + end)
        for _ in range(50_000):
            connection.sendall(b"a" * 1000)
        raise AssertionError("it has taken 50 MB")


def test_what_is_no_http_is_refused_in_our_shape(server: Served) -> None:
    assert error_in(server.say(b"\x16\x03\x01 hello\r\n\r\n"), 400)["code"] == "invalid_http"


@pytest.mark.parametrize("body", [b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", b"Transfer-Encoding: gzip\r\n\r\nabc"])
def test_a_body_that_is_no_http_is_refused_too(server: Served, body: bytes) -> None:
    assert error_in(server.say(HEAD + body), 400)["code"] == "invalid_http"


def test_what_is_wrong_with_a_later_request_is_no_answer_to_the_first(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((40,), asyncio.Event()))
    with served(gateway.app) as server, server.connect() as connection:
        connection.sendall(whole(STREAM))
        until(lambda: gateway.owner.open_now)
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n")
        assert b"invalid_http" not in read_all(connection)


UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"  # as Java's client sends it
)


def test_an_upgrade_is_passed_over_and_no_body_is_lost_by_it(server: Served) -> None:
    assert server.say(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + UPGRADE + b"\r\n").startswith(b"HTTP/1.1 200")
    assert "without Upgrade" in error_in(server.say(whole(BODY, UPGRADE)), 400)["message"]


def test_connections_are_bounded(server: Served) -> None:
    with server.connect() as first:
        connections = [server.connect() for _ in range(MOST - 1)]
        until(lambda: server.num_connections == MOST)
        answer = server.say()
        error = error_in(answer, 503)
        assert (error["code"], error["type"]) == ("server_is_overloaded", "service_unavailable_error")
        assert b"retry-after: 1" in answer.lower()
        first.shutdown(socket.SHUT_WR)
        assert read_all(first) == b""
        for connection in connections:
            connection.close()


def test_a_client_that_leaves_halfway_has_left(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((40,), asyncio.Event()))
    with served(gateway.app) as server, server.connect() as connection:
        connection.sendall(whole(STREAM))
        until(lambda: gateway.owner.open_now)
        connection.shutdown(socket.SHUT_WR)
        until(lambda: gateway.owner.cancelled)


def test_a_client_that_leaves_with_a_second_request_waiting_has_left_the_first(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((40,), asyncio.Event()))
    with served(gateway.app) as server:
        with server.connect() as connection:
            connection.sendall(whole(STREAM) + whole(STREAM))
            until(lambda: gateway.owner.open_now)
        until(lambda: gateway.owner.cancelled)
        assert len(gateway.owner.opened) == 1


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
def test_a_client_that_reads_nothing_of_an_answer_is_hung_up_on(close: bytes) -> None:
    async def large(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(32 << 20)})

    with served(large) as server, server.connect() as connection:
        until(lambda: server.num_connections == 1)
        server.hurry()
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + close + b"\r\n")
        until(lambda: server.server.server_state.total_requests == 1)
        until(lambda: server.num_connections == 0)


def test_a_stop_answers_the_bodies_that_wait_for_their_turn(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on, exceeds = threading.Event(), threading.Event(), TextModel.surely_exceeds

    def held_back(self: TextModel, texts: Any, most: int) -> bool:
        begun.set()
        go_on.wait(PATIENT_S)
        return exceeds(self, texts, most)

    monkeypatch.setattr(TextModel, "surely_exceeds", held_back)
    long = json.dumps({"model": "demo", "prompt": "a " * LONG_BYTES}).encode()
    sent = whole(long).replace(b"/v1/completions", b"/tokenize")
    with served(Gateway(text, FakeOwner((5,), (2,))).app) as server:
        first, second = server.connect(), server.connect()
        with first, second:
            first.sendall(sent)
            assert begun.wait(PATIENT_S)
            second.sendall(sent)
            until(lambda: len(server.server.server_state.tasks) == 2)
            server.stop()
            for connection in (first, second):
                error_in(read_all(connection), 503)
        go_on.set()
    assert not [record for record in caplog.records if record.exc_info]


def test_compressed_bodies_are_refused(gateway: Gateway) -> None:
    answer = gateway.ask("POST", "/v1/completions", content=b"x" * 9, headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    plain = gateway.ask("POST", "/v1/completions", content=BODY, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("how", [b"Content-Encoding: gzip", b"Transfer-Encoding: gzip, chunked"])
def test_a_compressed_bomb_is_never_unpacked(server: Served, how: bytes) -> None:
    bomb = gzip.compress(b" " * (20 << 20) + BODY)
    framed = b"%x\r\n" % len(bomb) + bomb + b"\r\n0\r\n\r\n"
    chunked = b"" if b"chunked" in how else b"Transfer-Encoding: chunked\r\n"
    with server.connect() as connection:
        connection.sendall(HEAD + how + b"\r\n" + chunked + b"\r\n" + framed)
        answer = connection.recv(1 << 16)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 415 ")), answer


def test_a_key_with_many_open_requests_leaves_others_connections(text: TextModel) -> None:
    keys = KeyRing([KeyEntry(name, hash_key(name)) for name in ("ann", "bob")])
    gateway = Gateway(text, FakeOwner((5,), asyncio.Event()), keys=keys)
    gateway.app.state.calls.most = MOST
    with served(gateway.app, most_connections=MOST) as server, ExitStack() as held:
        for number in range(2 * MOST):
            connection = held.enter_context(server.connect())
            connection.sendall(whole(STREAM, b"Authorization: Bearer ann\r\n"))
            if number < MOST // 2:
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            else:  # and it is hung up on
                assert error_in(read_all(connection), 429)["code"] == "rate_limit_exceeded"
                until(lambda: server.num_connections == MOST // 2)
        answer = server.say(whole(BODY, b"Authorization: Bearer bob\r\nConnection: close\r\n"))
        assert answer.startswith(b"HTTP/1.1 200 ")
        held.close()
        until(lambda: not server.num_connections)
        answer = server.say(whole(BODY, b"Authorization: Bearer ann\r\nConnection: close\r\n"))
        assert answer.startswith(b"HTTP/1.1 200 ")


class HeldBodies:
    """Bodies of 900 bytes and some, whose end comes when it is told to."""

    def __init__(self) -> None:
        self.go_on, self.num = asyncio.Event(), 0

    async def body(self) -> AsyncIterator[bytes]:
        yield b" " * 900
        self.num += 1
        await self.go_on.wait()
        yield BODY


def test_keys_with_slow_bodies_leave_room_to_others(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.http.bodies.BODIES_AT_ONCE", 4)
    keys = KeyRing([KeyEntry(name, hash_key(name)) for name in ("ann", "bob", "cat")])
    gateway = Gateway(text, FakeOwner((2,)), body_limit_bytes=1000, keys=keys)

    async def asked() -> None:
        held = HeldBodies()

        async with gateway.client() as client:

            async def post(key: str, content: Any) -> httpx.Response:
                headers = JSON | {"Authorization": f"Bearer {key}"}
                return await client.post("/v1/completions", content=content, headers=headers)

            slow_ones = [asyncio.create_task(post(key, held.body())) for key in ("ann", "ann", "bob", "bob")]
            while held.num < 3:
                await asyncio.sleep(0.001)
            refused = await slow_ones[3]
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert (await post("cat", b" " * 500 + BODY)).status_code == 200
            held.go_on.set()
            assert (await slow_ones[2]).status_code == 200
            assert {(await answer).status_code for answer in slow_ones[:2]} <= {200, 429}
            assert (await post("ann", b" " * 900 + BODY)).status_code == 200

    asyncio.run(asyncio.wait_for(asked(), PATIENT_S))


def test_all_bodies_together_are_bounded(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.http.bodies.BODIES_AT_ONCE", 2)
    gateway = Gateway(text, FakeOwner((2,)), body_limit_bytes=1000)

    async def asked() -> None:
        held = HeldBodies()

        async with gateway.client() as client:
            slow_ones = [
                asyncio.create_task(client.post("/v1/completions", content=held.body(), headers=JSON)) for _ in range(2)
            ]
            while held.num < 2:
                await asyncio.sleep(0.001)
            refused = await client.post("/v1/completions", content=b" " * 500, headers=JSON)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            held.go_on.set()
            assert [(await answer).status_code for answer in slow_ones] == [200, 200]
            after = await client.post("/v1/completions", content=b" " * 900 + BODY, headers=JSON)
            assert after.status_code == 200

    asyncio.run(asyncio.wait_for(asked(), PATIENT_S))


ANYTHING = settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.just(10**400) | st.just("\x00"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(["prompt", "messages", "max_tokens", "stop", "n", "seed", "logit_bias", "slo", "metadata"])


@pytest.fixture(scope="module")
def lasting(text: TextModel) -> Iterator[Served]:
    with served(Gateway(text, FakeOwner((5,), (2,))).app) as server:
        yield server


class TestWhateverIsSent:
    """The server answers bytes and bodies that follow no rule, never with a 5xx, and serves a good request right
    after."""

    @ANYTHING
    @given(st.dictionaries(NAMES | TEXTS, VALUES, max_size=5), st.sampled_from(["completions", "chat/completions"]))
    def test_bodies(self, lasting: Served, fields: dict[str, Any], route: str) -> None:
        body = {"model": "demo", "prompt": "Hi", **fields}
        twice = json.dumps(body)[:-1] + ', "prompt": 5, "prompt": "Hi"}'
        with httpx.Client(base_url=f"http://127.0.0.1:{lasting.port}") as client:
            for content in (json.dumps(body), twice):
                answer = client.post(f"/v1/{route}", content=content, headers=JSON)
                assert answer.status_code in (200, 400, 404), answer.text
        assert works(lasting)

    @ANYTHING
    @given(st.binary(max_size=200), st.sampled_from([b"", HEAD, HEAD + b"Transfer-Encoding: chunked\r\n\r\n"]))
    def test_bytes(self, lasting: Served, sent: bytes, before: bytes) -> None:
        with lasting.connect() as connection, suppress(ConnectionError):
            connection.sendall(before + sent)
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
            assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")), answer
        assert works(lasting)
