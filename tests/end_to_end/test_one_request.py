"""Tests of what one request can do to a deployment and to the clients beside it: nothing.

Two faults are planted: a line of a batch that kills the job runner, and a route that holds up a gateway's event loop.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.client import client
from tests.end_to_end.deployment import ANSWER_S, NAME, Deployment, deployed, wait_until

KILLS = "end the job runner"
HELD_UP_S = 6.0  # twice the time after which a silent part is taken for dead
FAULTS = f"""
import json, os, signal, time
from alignedserve.gateway import app
from alignedserve.jobs.answering import Answering

answer, version = Answering.answer, app._version


async def answer_or_die(self, line, on_running):
    if {KILLS!r} in json.dumps(line.body):
        os.kill(os.getpid(), signal.SIGKILL)
    return await answer(self, line, on_running)


Answering.answer = answer_or_die
app._version = lambda: time.sleep({HELD_UP_S}) or version()
"""
UNREAD, TOKENS = 2, 600  # clients that do not read, each of 4 choices of so many tokens: 600 kB
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with deployed(plant=FAULTS) as running:
        yield running


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": MESSAGES, "temperature": 0, "ignore_eos": True, **fields}


async def stream(http: httpx.AsyncClient, **fields: Any) -> str:
    """Return the text of a stream that ended well."""
    text, finish = "", None
    async with http.stream("POST", "/v1/chat/completions", json=chat(stream=True, **fields)) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text, finish = text + choice["delta"].get("content", ""), choice["finish_reason"] or finish
    assert finish == "length"
    return text


def test_an_answer_with_a_million_numbers_ends_no_part_and_no_stream(deployment: Deployment) -> None:
    parts = {part: deployment.pid(part) for part in ("gateway-0", "router", "decode-0", "jobs-0")}

    async def beside() -> tuple[httpx.Response, httpx.Response, list[str], str]:
        async with client(deployment.url) as http:
            asked = chat(n=128, max_tokens=600, logprobs=True, top_logprobs=20)
            refused = await http.post("/v1/chat/completions", json=asked)
            large = asyncio.create_task(http.post("/v1/chat/completions", json={**asked, "max_tokens": 12}))
            streams = [asyncio.create_task(stream(http, max_tokens=150)) for _ in range(2)]
            answer, texts = await large, await asyncio.gather(*streams)
            return refused, answer, texts, await stream(http, max_tokens=150)

    refused, answer, texts, alone = asyncio.run(beside())
    assert refused.status_code == 400
    assert "1612800" in refused.json()["error"]["message"]
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(128))
    assert {len(choice["logprobs"]["content"]) for choice in choices} == {12}
    assert set(texts) == {alone}
    assert {part: deployment.pid(part) for part in parts} == parts


def test_an_event_loop_that_is_held_up_is_not_taken_for_dead(deployment: Deployment) -> None:
    gateway = deployment.pid("gateway-0")

    async def beside() -> tuple[httpx.Response, str, str]:
        async with client(deployment.url) as http:
            text = asyncio.create_task(stream(http, max_tokens=400))
            version = await http.get("/version")
            return version, await text, await stream(http, max_tokens=400)

    version, text, alone = asyncio.run(beside())
    assert version.status_code == 200
    assert text == alone
    assert deployment.pid("gateway-0") == gateway


def is_idle(deployment: Deployment) -> bool:
    """Return whether no request runs, and no token is made for a while."""
    before = deployment.metric("generation_tokens_total")
    time.sleep(1.0)
    return deployment.metric("num_requests_running") == 0 and deployment.metric("generation_tokens_total") == before


def test_clients_that_do_not_read_take_no_seats_and_go_on_where_they_stopped(deployment: Deployment) -> None:
    host, _, port = deployment.url.removeprefix("http://").partition(":")
    body = json.dumps(chat(n=4, max_tokens=TOKENS, stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connections = [socket.create_connection((host, int(port)), timeout=ANSWER_S) for _ in range(UNREAD)]
    for connection in connections:
        connection.sendall(head.encode() + body)
    before = deployment.metric("generation_tokens_total")
    wait_until(lambda: deployment.metric("generation_tokens_total") > before + UNREAD, ANSWER_S, deployment.log)
    wait_until(lambda: is_idle(deployment), ANSWER_S, deployment.log)
    made = deployment.metric("generation_tokens_total") - before
    assert made < 0.75 * UNREAD * 4 * TOKENS, "what nobody reads is not generated to its end"

    async def alone() -> str:
        async with client(deployment.url) as http:
            return await stream(http, max_tokens=TOKENS)

    text = asyncio.run(alone())
    for connection in connections[1:]:
        connection.close()
    read = bytearray()
    while new := connections[0].recv(1 << 16):
        read += new
    connections[0].close()
    texts = dict.fromkeys(range(4), "")
    for line in read.splitlines():
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert list(texts.values()) == [text] * 4
    wait_until(lambda: is_idle(deployment), ANSWER_S, deployment.log)


def test_a_line_that_kills_the_job_runner_is_failed_and_other_batches_end(deployment: Deployment) -> None:
    def line(number: int, content: str) -> bytes:
        asked = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        named = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": asked}
        return json.dumps(named).encode() + b"\n"

    with httpx.Client(base_url=f"{deployment.url}/v1", timeout=ANSWER_S, trust_env=False) as http:

        def submit(lines: bytes) -> str:
            file = http.post("/files", files={"file": ("x.jsonl", lines)}, data={"purpose": "batch"}).json()
            asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            return str(http.post("/batches", json=asked).json()["id"])

        def batch(id: str) -> Any:
            return http.get(f"/batches/{id}").json()

        good = submit(b"".join(line(number, "Hello") for number in range(40)))
        bad = submit(b"".join(line(number, KILLS if number == 2 else "Hello") for number in range(5)))
        wait_until(lambda: {batch(id)["status"] for id in (good, bad)} == {"completed"}, 2 * ANSWER_S, deployment.log)
        assert batch(good)["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert batch(bad)["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
        (failed,) = http.get(f"/files/{batch(bad)['error_file_id']}/content").text.splitlines()
        assert json.loads(failed)["custom_id"] == "2"
        assert json.loads(failed)["error"]["code"] == "job_runner_died"
    assert deployment.whole_log().count("has ended the job runner") == 1
