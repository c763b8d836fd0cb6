"""Tests that a request is cancelled everywhere when its client leaves or stops reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from alignedserve.core import Spent
from alignedserve.owner.arrivals import ArrivalQueues
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, PATIENT_S, Connection, FakeOwner, Gateway, log_lines


def connection(stream: bool, **fields: Any) -> Connection:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream, **fields}
    return Connection("/v1/chat/completions", json.dumps(body).encode())


async def until(happened: Callable[[], Any]) -> None:
    while not happened():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [(), ((5,), (6,))], ids=["before the first token", "after some"])
def test_leaving_cancels(
    text: TextModel, stream: bool, before: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def left() -> Gateway:
        gateway = Gateway(text, FakeOwner(*before, asyncio.Event()))
        gateway.owner.used = Spent(0.5, 20.0)
        client = connection(stream)
        answering = asyncio.create_task(gateway.app(client.scope, client.receive, client.send))
        await until(lambda: len(client.sent) > 2 if stream and before else gateway.owner.open_now)
        client.left.set()
        await answering
        assert gateway.owner.open_now == set()
        assert gateway.owner.cancelled == [gateway.owner.opened[0].id]
        return gateway

    with log_lines(caplog) as lines:
        gateway = asyncio.run(asyncio.wait_for(left(), PATIENT_S))
    assert [(line["status"], line["finish"], line["output_tokens"]) for line in lines] == [(499, "abort", len(before))]
    assert gateway.metric('alignedserve:request_success_total{class="rt",finished_reason="abort"}') == 1
    assert gateway.metric('alignedserve:num_requests_open{class="rt"}') == 0
    assert gateway.metric('alignedserve:request_device_seconds_total{class="rt",key="anonymous"}') == 0.5
    assert "http_errors_total{" not in gateway.get("/metrics").text, "that a client leaves is no error"


def test_leaving_in_the_middle_of_the_body_opens_nothing(text: TextModel) -> None:
    async def left() -> None:
        gateway = Gateway(text, FakeOwner())
        client = connection(True)
        client._body[0]["more_body"] = True
        client.left.set()
        await gateway.app(client.scope, client.receive, client.send)
        assert (gateway.owner.opened, client.sent) == ([], [])

    asyncio.run(asyncio.wait_for(left(), PATIENT_S))


def test_a_client_that_reads_nothing_is_given_up(text: TextModel) -> None:
    async def stalled() -> None:
        gateway = Gateway(text, FakeOwner((5,), (6,), (7,), asyncio.Event()), stalled_client_s=0.05)
        client = connection(True)
        client.reads.clear()
        await gateway.app(client.scope, client.receive, client.send)
        assert gateway.owner.cancelled == [gateway.owner.opened[0].id]

    asyncio.run(asyncio.wait_for(stalled(), PATIENT_S))


@pytest.mark.parametrize("n", [1, 2])
def test_the_requests_of_a_client_that_does_not_read_are_paused_until_it_has_read_all(
    text: TextModel, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.gateway.openai.streaming.BLOCKED_S", 0.05)

    async def stalled() -> None:
        go_on = asyncio.Event()
        gateway = Gateway(text, FakeOwner((40,), (41,), go_on, (2,)))
        owner, client = gateway.owner, connection(True, n=n)
        answering = asyncio.create_task(gateway.app(client.scope, client.receive, client.send))
        await until(lambda: len(client.sent) > n)
        client.reads.clear()
        go_on.set()
        await until(lambda: owner.paused)
        ids = sorted(request.id for request in owner.opened)
        assert (sorted(owner.paused), owner.resumed) == (ids, [])
        client.reads.set()
        await answering
        assert b"[DONE]" in client.sent[-2]["body"]
        assert sorted(owner.paused) == ids

    asyncio.run(asyncio.wait_for(stalled(), PATIENT_S))


def test_a_paused_request_goes_on_when_its_client_has_read_all(
    text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.gateway.openai.streaming.BLOCKED_S", 0.05)

    async def stalled() -> None:
        more, again, rest = asyncio.Event(), asyncio.Event(), asyncio.Event()
        gateway = Gateway(text, FakeOwner((40,), more, (41,), again, (42,), rest, (2,)))
        owner, client = gateway.owner, connection(True)
        answering = asyncio.create_task(gateway.app(client.scope, client.receive, client.send))
        await until(lambda: len(client.sent) == 3)
        client.reads.clear()
        more.set()
        await until(lambda: owner.paused)
        owner.unread.add(owner.opened[0].id)
        client.reads.set()
        await until(lambda: len(client.sent) == 4)
        await asyncio.sleep(0.01)
        assert owner.resumed == [], "there is more to read"
        owner.unread.clear()
        again.set()
        await until(lambda: owner.resumed)
        assert len(client.sent) == 5
        assert owner.resumed == owner.paused == [owner.opened[0].id]
        rest.set()
        await answering
        assert owner.cancelled == []

    asyncio.run(asyncio.wait_for(stalled(), PATIENT_S))


def test_a_server_that_stops_cancels_what_is_open(text: TextModel) -> None:
    async def stopped() -> None:
        gateway = Gateway(text, FakeOwner((40,), asyncio.Event()))
        client = connection(True)
        answering = asyncio.create_task(gateway.app(client.scope, client.receive, client.send))
        await until(lambda: len(client.sent) > 2)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        assert gateway.owner.cancelled == [gateway.owner.opened[0].id]

    asyncio.run(asyncio.wait_for(stopped(), PATIENT_S))


def test_a_token_is_sent_when_it_comes(text: TextModel) -> None:
    async def streamed() -> None:
        go_on = asyncio.Event()
        gateway = Gateway(text, FakeOwner((40,), go_on, (2,)))
        client = connection(True)
        answering = asyncio.create_task(gateway.app(client.scope, client.receive, client.send))
        await until(lambda: len(client.sent) == 3)  # the start, the role, the token
        assert b'"content":' in client.sent[2]["body"]
        go_on.set()
        await answering
        assert gateway.owner.cancelled == []

    asyncio.run(asyncio.wait_for(streamed(), PATIENT_S))


def test_what_comes_when_nobody_listens_any_more_is_dropped() -> None:
    """A token that arrives after its event loop has ended does not end the process."""
    arrivals: ArrivalQueues[int] = ArrivalQueues()

    async def listen() -> None:
        with arrivals.waiting_for("req-a"):
            pass

    asyncio.run(listen())
    arrivals.put("req-a", 1)
