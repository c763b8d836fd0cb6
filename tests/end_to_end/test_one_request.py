"""Tests of what one request can do to a deployment and to the clients beside it: nothing.

Faults are planted: a line of a batch that kills the job runner, a route that holds up a gateway's event loop, and steps
that take long, so that a client that does not read is noticed before all is generated.
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
from tests.rare import rare

KILLS = "end the job runner"
STEP_S = 0.025
HELD_UP_S = 6.0  # twice the time after which a silent part is taken for dead
FAULTS = f"""
import json, os, signal, time
from alignedserve.engine.engine import Engine
from alignedserve.gateway import app
from alignedserve.jobs.answering import Answering

answer, version, begin = Answering.answer, app._version, Engine.begin


def begin_late(self, plan):
    time.sleep({STEP_S})
    return begin(self, plan)


Engine.begin = begin_late


async def answer_or_die(self, line, on_running):
    if {KILLS!r} in json.dumps(line.body):
        os.kill(os.getpid(), signal.SIGKILL)
    return await answer(self, line, on_running)


Answering.answer = answer_or_die
app._version = lambda: time.sleep({HELD_UP_S}) or version()
"""
TOKENS = 200  # of each of 4 choices for a client that does not read: 2 MB in 5 s
BUFFER = 4096  # bytes that the kernel keeps for such a client
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture(scope="module")
def faulty() -> Iterator[Deployment]:
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


def test_an_answer_with_a_million_numbers_ends_no_part_and_no_stream(faulty: Deployment) -> None:
    parts = {part: faulty.pid(part) for part in ("gateway-0", "router", "decode-0", "jobs-0")}

    async def beside() -> tuple[httpx.Response, httpx.Response, list[str], str]:
        async with client(faulty.url) as http:
            asked = chat(n=128, max_tokens=600, logprobs=True, top_logprobs=20)
            refused = await http.post("/v1/chat/completions", json=asked)
            large = asyncio.create_task(http.post("/v1/chat/completions", json={**asked, "max_tokens": 12}))
            streams = [asyncio.create_task(stream(http, max_tokens=60)) for _ in range(2)]
            answer, texts = await large, await asyncio.gather(*streams)
            return refused, answer, texts, await stream(http, max_tokens=60)

    refused, answer, texts, alone = asyncio.run(beside())
    assert refused.status_code == 400
    assert "1612800" in refused.json()["error"]["message"]
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(128))
    assert {len(choice["logprobs"]["content"]) for choice in choices} == {12}
    assert set(texts) == {alone}
    assert {part: faulty.pid(part) for part in parts} == parts


@rare  # tests/launch/test_keeper.py has parts that stand still and are not taken for dead
def test_an_event_loop_that_is_held_up_is_not_taken_for_dead(faulty: Deployment) -> None:
    gateway = faulty.pid("gateway-0")

    async def beside() -> tuple[httpx.Response, str, str]:
        async with client(faulty.url) as http:
            text = asyncio.create_task(stream(http, max_tokens=200))
            version = await http.get("/version")
            return version, await text, await stream(http, max_tokens=200)

    version, text, alone = asyncio.run(beside())
    assert version.status_code == 200
    assert text == alone
    assert faulty.pid("gateway-0") == gateway


def is_idle(deployment: Deployment) -> bool:
    """Return whether no request runs, and no token is made for a while."""
    before = deployment.metric("generation_tokens_total")
    time.sleep(1.0)
    return deployment.metric("num_requests_running") == 0 and deployment.metric("generation_tokens_total") == before


def test_a_client_that_does_not_read_takes_no_seat_and_goes_on_where_it_stopped(faulty: Deployment) -> None:
    host, _, port = faulty.url.removeprefix("http://").partition(":")
    body = json.dumps(chat(n=4, max_tokens=TOKENS, stream=True, logprobs=True, top_logprobs=20)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    before = faulty.metric("generation_tokens_total")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    connection.settimeout(ANSWER_S)
    connection.connect((host, int(port)))
    connection.sendall(head.encode() + body)
    wait_until(lambda: faulty.metric("generation_tokens_total") > before, ANSWER_S, faulty.log)
    wait_until(lambda: is_idle(faulty), ANSWER_S, faulty.log)
    made = faulty.metric("generation_tokens_total") - before
    assert made < 0.5 * 4 * TOKENS, "what nobody reads is not generated to its end"

    async def alone() -> str:
        async with client(faulty.url) as http:
            return await stream(http, max_tokens=TOKENS)

    text = asyncio.run(alone())
    read = bytearray()
    while new := connection.recv(1 << 16):
        read += new
    connection.close()
    texts = dict.fromkeys(range(4), "")
    for line in read.splitlines():
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert list(texts.values()) == [text] * 4
    wait_until(lambda: is_idle(faulty), ANSWER_S, faulty.log)


@rare  # tests/jobs/test_open_lines.py finds such lines, and test_batches.py kills a job runner
def test_a_line_that_kills_the_job_runner_is_failed_and_other_batches_end(faulty: Deployment) -> None:
    def line(number: int, content: str) -> bytes:
        asked = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        named = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": asked}
        return json.dumps(named).encode() + b"\n"

    with httpx.Client(base_url=f"{faulty.url}/v1", timeout=ANSWER_S, trust_env=False) as http:

        def submit(lines: bytes) -> str:
            file = http.post("/files", files={"file": ("x.jsonl", lines)}, data={"purpose": "batch"}).json()
            asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            return str(http.post("/batches", json=asked).json()["id"])

        def batch(id: str) -> Any:
            return http.get(f"/batches/{id}").json()

        good = submit(b"".join(line(number, "Hello") for number in range(20)))
        bad = submit(b"".join(line(number, KILLS if number == 2 else "Hello") for number in range(5)))
        wait_until(lambda: {batch(id)["status"] for id in (good, bad)} == {"completed"}, 2 * ANSWER_S, faulty.log)
        assert batch(good)["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert batch(bad)["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
        (failed,) = http.get(f"/files/{batch(bad)['error_file_id']}/content").text.splitlines()
        assert json.loads(failed)["custom_id"] == "2"
        assert json.loads(failed)["error"]["code"] == "job_runner_died"
    assert faulty.whole_log().count("has ended the job runner") == 1
