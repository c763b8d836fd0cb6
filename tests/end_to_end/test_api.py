"""Tests of a real server with OpenAI's client and bare HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import aclosing, closing
from typing import Any

import httpx
import openai
import pytest

from tests.end_to_end.client import Wanted, client, streamed
from tests.end_to_end.deployment import ANSWER_S, BACK_S, NAME, Deployment, wait_until
from tests.rare import rarely, thinned

ASKED: Any = {"model": NAME, "messages": [{"role": "user", "content": "Count from 3 to 12."}], "temperature": 0}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def sdk(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with closing(openai.OpenAI(api_key="none", base_url=f"{deployment.url}/v1", max_retries=0)) as client:
        yield client


# --- OpenAI's client


def test_it_chats_the_same_streamed_and_not(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**ASKED)
    *chunks, last = sdk.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage is not None
    assert whole.usage is not None
    usages = [usage.model_dump() for usage in (last.usage, whole.usage)]
    assert all(usage.pop("cost")["device_seconds"] > 0 for usage in usages)
    assert usages[0] == usages[1]
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_it_completes_and_counts(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=NAME, prompt="One two three", max_tokens=5, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")


def test_it_names_its_model(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [NAME]


def test_it_tells_what_its_workers_can_promise(deployment: Deployment) -> None:
    promise = deployment.ask("/ready").json()["promise"]
    assert promise["by"] == "machine"
    assert promise["ttft_ms"] >= 1000
    assert promise["tbt_ms"] >= 187.5
    assert deployment.ask("/status").json()["promise"] == promise


def test_a_seed_repeats_what_was_sampled(sdk: openai.OpenAI) -> None:
    story = [{"role": "user", "content": "Tell me a story."}]  # the demo model is too sure of other topics
    asked: dict[str, Any] = {**ASKED, "messages": story, "temperature": 2.0, "max_tokens": 20}
    first, again, reseeded = (sdk.chat.completions.create(**asked, seed=seed) for seed in (7, 7, 8))
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != reseeded.choices[0].message.content


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
    ],
)
def test_it_raises_typed_errors(
    sdk: openai.OpenAI, changes: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(error) as raised:
        sdk.chat.completions.create(**{**ASKED, **changes})
    assert raised.value.param == param
    assert sdk.chat.completions.create(**ASKED, max_tokens=2).choices


# --- Bare HTTP


def test_a_stream_is_framed_as_events(deployment: Deployment) -> None:
    body = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{deployment.url}{CHAT}", json=body, timeout=ANSWER_S)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("stream", [rarely(False), True])
def test_a_promise_that_no_server_can_keep_is_named_or_refused(deployment: Deployment, stream: bool) -> None:
    """The router knows what a prompt takes soon after a worker has run one."""
    with httpx.Client(base_url=deployment.url, timeout=ANSWER_S) as http:
        assert "x-slo-infeasible" not in http.post(CHAT, json=ASKED).headers
        body = {**ASKED, "stream": stream, "slo": {"ttft_ms": 0.01}}
        wait_until(lambda: http.post(CHAT, json=body).headers.get("x-slo-infeasible") == "ttft", BACK_S)
        assert http.post(CHAT, json=body).status_code == 200
        refused = http.post(CHAT, json={**body, "slo": {"ttft_ms": 0.01, "strict": True}})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1"), refused.text
        assert "its prompt alone takes" in refused.json()["error"]["message"]


BAD: list[tuple[str, bytes, int, str | None]] = [  # tests/gateway/test_errors.py has more
    ("malformed JSON", b'{"model": ', 400, None),
    ("no object", b"[1]", 400, None),
    ("invalid UTF-8", b'{"model": "demo", "prompt": "\xff\xfe"}', 400, None),
    ("wrong type", b'{"model": "demo", "prompt": 3}', 400, "prompt"),
    ("missing prompt", b'{"model": "demo"}', 400, "prompt"),
    ("empty prompt", b'{"model": "demo", "prompt": []}', 400, "prompt"),
    ("unknown model", b'{"model": "other", "prompt": "x"}', 404, "model"),
    ("unknown token", b'{"model": "demo", "prompt": [99999999]}', 400, "prompt"),
    ("negative token", b'{"model": "demo", "prompt": [-1]}', 400, "prompt[0]"),
    ("negative max_tokens", b'{"model": "demo", "prompt": "x", "max_tokens": -3}', 400, "max_tokens"),
    ("too long a prompt", json.dumps({"model": NAME, "prompt": [5] * 100_000}).encode(), 400, "prompt"),
    ("too large a body", json.dumps({"model": NAME, "prompt": "x" * (5 << 20)}).encode(), 413, None),
    ("unknown field", b'{"model": "demo", "prompt": "x", "max_tokns": 3}', 400, "max_tokns"),
]


@pytest.mark.parametrize(("name", "body", "status", "param"), thinned(BAD, usual=5))
def test_a_bad_request_is_refused_and_a_good_request_follows(
    deployment: Deployment, name: str, body: bytes, status: int, param: str | None
) -> None:
    with httpx.Client(base_url=deployment.url, timeout=ANSWER_S) as http:
        answer = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == status, (name, answer.text)
        error = answer.json()["error"]
        assert error["message"]
        assert error["param"] == param or param is None
        good = http.post(COMPLETIONS, json=Wanted((5, 6, 7), 2, stream=False, ignore_eos=True).body)
        assert (good.status_code, good.json()["usage"]["completion_tokens"]) == (200, 2)


def test_it_answers_to_its_own_names_alone(deployment: Deployment) -> None:
    def status(host: str) -> int:
        return httpx.get(f"{deployment.url}/v1/models", headers={"Host": host}, timeout=ANSWER_S).status_code

    assert [status(name) for name in ("127.0.0.1", "localhost:1", socket.gethostname(), "page.example")] == [
        *[200] * 3,
        421,
    ]


def test_it_rests_while_nobody_asks(deployment: Deployment) -> None:
    """The deployment may still have work of earlier requests, so the test waits until it is idle."""

    def rests() -> bool:
        share = deployment.share_of_a_core(during_s=2)
        print(f"idle: {share:.1%} of one core")
        return share < 0.05

    wait_until(rests, BACK_S, deployment.log)


# --- Clients that leave

MOST_TOKENS = 1500  # their computation takes long after the first


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "not streamed"])
def test_a_client_that_leaves_is_not_served_on(deployment: Deployment, stream: bool) -> None:
    before, steps = deployment.metric("generation_tokens_total"), deployment.metric("decode_steps_total")

    async def leaves() -> None:
        async with client(deployment.url) as http:
            body = Wanted((5, 6, 7), MOST_TOKENS, stream, ignore_eos=True).body
            if stream:
                async with aclosing(streamed(http, body)) as chunks:
                    assert await anext(chunks)
            else:
                asked = asyncio.create_task(http.post(COMPLETIONS, json=body))
                while await asyncio.to_thread(deployment.metric, "generation_tokens_total") == before:
                    await asyncio.sleep(0.02)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(leaves())
    wait_until(lambda: deployment.metric("num_requests_open") == 0, BACK_S, deployment.log)
    wait_until(lambda: deployment.share_of_a_core(during_s=0.5) < 0.2, BACK_S, deployment.log)
    assert deployment.metric("decode_steps_total") - steps < MOST_TOKENS / 2, "the worker goes on for nobody"


# --- Logs and metrics for operators


def test_a_request_is_followed_through_the_logs_of_all_parts(deployment: Deployment) -> None:
    """The logs name the request by its id, and contain none of its words.

    The output is known to be long: a short one would end on the prefill worker, without the pool."""
    with httpx.Client(base_url=deployment.url, timeout=ANSWER_S) as http:
        asked = {**ASKED, "messages": [{"role": "user", "content": "Spell xyzzyplugh"}]}
        asked |= {"max_tokens": 200, "ignore_eos": True}
        request_id = http.post(CHAT, json=asked).headers["x-request-id"]
    parts = {"router", "gateway-0", "decode-0"}
    if any("prefill-0" in command for command in deployment.processes().values()):
        parts |= {"prefill-0", "pool-0"}

    def named() -> set[str]:
        lines = [line for line in deployment.whole_log().splitlines() if f"request_id={request_id}" in line]
        return {part for part in parts for line in lines if f" {part}: " in line}

    wait_until(lambda: named() == parts, BACK_S, lambda: f"{parts - named()} say nothing:\n{deployment.log()}")
    assert "xyzzyplugh" not in deployment.whole_log()


def test_metrics_show_every_part_and_what_workers_have_done(deployment: Deployment) -> None:
    with httpx.Client(base_url=deployment.url, timeout=ANSWER_S) as http:
        http.post(CHAT, json=ASKED).raise_for_status()
    names = {part["name"] for part in deployment.ask("/status").json()["parts"]}
    workers = {name for name in names if name.startswith(("prefill", "decode"))}

    def seen(series: str) -> set[str]:
        exposed = deployment.ask("/metrics").text
        return set(re.findall(rf'^{series}{{\S*(?:part|worker)="([^"]*)"', exposed, re.MULTILINE))

    wait_until(lambda: seen("process_cpu_seconds_total") == names, ANSWER_S, deployment.log)
    wait_until(lambda: seen("alignedserve:iteration_tokens_total_count") == workers, ANSWER_S, deployment.log)
    wait_until(lambda: deployment.metric("num_requests_running") == 0, ANSWER_S, deployment.log)
