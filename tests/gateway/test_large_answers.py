"""Tests that no answer holds up those beside it, however large it is: it is written in parts, and has a limit."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.sections import JobsConfig
from alignedserve.core import Request, ServiceClass, Slo
from alignedserve.gateway.access.keys import Caller, KeyEntry, KeyRing, Limits, hash_key
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.promises import ServicePromise
from alignedserve.gateway.openai.requests import Origin, make_requests
from alignedserve.gateway.openai.strict import parse_body
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.gateway.openai.writing import PART_BYTES, ascii_json, json_parts
from alignedserve.gateway.responses.keeping import ResponseKeeper
from alignedserve.jobs.lines import answered_line
from alignedserve.owner.client import Delivered
from alignedserve.store.storage import LazyStorage
from alignedserve.store.store import Holder
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, PATIENT_S, Connection, FakeOwner, Gateway

TOKENS, CHOICES = 100, 8
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": CHOICES}
SLICE_BYTES = 3 * PART_BYTES  # a part, and the items that fill it


class Ticking(Connection):
    """A client that notes how often the event loop has turned when each part of its answer is sent."""

    def __init__(self, path: str, fields: dict[str, Any]) -> None:
        super().__init__(path, json.dumps({"model": MODEL, "max_tokens": TOKENS, **fields}).encode())
        self.turns, self.turns_at = 0, list[int]()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message.get("body"):
            self.turns_at.append(self.turns)

    async def tick(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)

    @property
    def parts(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message.get("body")]


def answer_of(gateway: Gateway, path: str, fields: dict[str, Any]) -> Ticking:
    async def asked() -> Ticking:
        client = Ticking(path, fields)
        ticking = asyncio.create_task(client.tick())
        await asyncio.wait_for(gateway.app(client.scope, client.receive, client.send), PATIENT_S)
        ticking.cancel()
        return client

    return asyncio.run(asked())


def assert_others_had_their_turn(parts: Sequence[bytes], turns_at: Sequence[int]) -> None:
    assert len(parts) > 3
    assert max(map(len, parts)) < SLICE_BYTES
    large = [at for part, at in zip(parts, turns_at, strict=True) if len(part) >= PART_BYTES]
    assert all(before < after for before, after in pairwise(large)), large


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(text, FakeOwner(*[(300 + at % 100,) for at in range(TOKENS)]))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 20, "n": CHOICES}),
    ],
)
def test_the_event_loop_turns_while_a_large_answer_is_written(
    gateway: Gateway, path: str, fields: dict[str, Any]
) -> None:
    client = answer_of(gateway, path, fields)
    assert_others_had_their_turn(client.parts, client.turns_at)
    answer = json.loads(b"".join(client.parts))
    assert answer["usage"]["completion_tokens"] == CHOICES * TOKENS
    alone = gateway.ask("POST", path, json={"model": MODEL, "max_tokens": TOKENS, **fields, "n": 1}).json()["choices"]
    assert [{**choice, "index": 0} for choice in answer["choices"]] == CHOICES * alone
    table = alone[0]["logprobs"]
    assert {len(column) for column in table.values() if column is not None} == {TOKENS}


class Looking(FakeOwner):
    """Notes how many objects Python has to look through for garbage when the last token of a request is delivered."""

    num_objects = 0

    async def _play(self, request: Request) -> AsyncGenerator[Delivered, None]:
        async with aclosing(super()._play(request)) as deliveries:
            async for delivered in deliveries:
                if delivered.finish:
                    gc.collect()
                    self.num_objects = len(gc.get_objects())
                yield delivered


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 20}),
        ("/v1/responses", {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 20}),
    ],
)
def test_a_large_answer_is_no_objects_while_it_is_gathered(text: TextModel, path: str, fields: dict[str, Any]) -> None:
    """While Python looks through a million objects every thread of the process waits, and all other answers."""
    gc.collect()
    gc.freeze()  # to look through all that tests before this one have left takes a second each time
    held = []
    plain = {name: value for name, value in fields.items() if "logprobs" not in name and name != "include"}
    for asked in (plain, fields, plain):  # with the first ends what a test before this one has left
        owner = Looking(*[(300 + at % 100,) for at in range(TOKENS)])
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        assert Gateway(text, owner).ask("POST", path, json={"model": MODEL, limit: TOKENS, **asked}).status_code == 200
        held.append(owner.num_objects)
    assert held[1] - held[2] < 5 * TOKENS, "an object for each log-probability"


def test_a_large_answer_says_the_same_as_its_stream(gateway: Gateway) -> None:
    whole = json.loads(b"".join(answer_of(gateway, "/v1/chat/completions", CHAT).parts))
    streamed = b"".join(answer_of(gateway, "/v1/chat/completions", {**CHAT, "stream": True}).parts)
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith(b"data: {")]
    for choice in whole["choices"]:
        chunks = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == choice["message"]["content"]


def test_a_stream_that_repeats_its_prompt_writes_it_in_parts(gateway: Gateway) -> None:
    prompt, short = [*range(300, 500)], {"logprobs": 20, "echo": True, "max_tokens": 2}
    client = answer_of(gateway, "/v1/completions", {"prompt": prompt, "stream": True, **short})
    assert_others_had_their_turn(client.parts, client.turns_at)
    assert b"".join(client.parts).isascii()
    events = [json.loads(line[6:]) for line in b"".join(client.parts).splitlines() if line.startswith(b"data: {")]
    (whole,) = gateway.complete(prompt=prompt, **short).json()["choices"]
    for name, column in whole["logprobs"].items():
        assert [item for event in events for item in event["choices"][0]["logprobs"][name]] == column


def test_the_last_events_of_a_response_are_written_in_parts(text: TextModel, tmp_path: Path) -> None:
    """Four of them hold all of its log-probabilities."""
    config = JobsConfig(directory=str(tmp_path))
    keeper = ResponseKeeper(LazyStorage(config, Holder("gateway-0", 1)), config)
    gateway = Gateway(text, FakeOwner(*[(300 + at % 100,) for at in range(TOKENS)]), keeper=keeper)
    body: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": TOKENS, "top_logprobs": 20}
    body["include"] = ["message.output_text.logprobs"]
    client = Ticking("/v1/responses", {"stream": True})
    client._body[0]["body"] = json.dumps({**body, "stream": True}).encode()

    async def asked() -> None:
        ticking = asyncio.create_task(client.tick())
        await asyncio.wait_for(gateway.app(client.scope, client.receive, client.send), PATIENT_S)
        ticking.cancel()

    asyncio.run(asked())
    last = next(at for at, part in enumerate(client.parts) if b"response.output_text.done" in part)
    assert_others_had_their_turn(client.parts[last:], client.turns_at[last:])
    lines = b"".join(client.parts).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    response = events[-1]["response"]
    (content,) = response["output"][0]["content"]
    assert len(content["logprobs"]) == TOKENS
    kept = gateway.get(f"/v1/responses/{response['id']}").json()
    assert kept["output"] == response["output"]
    whole = gateway.ask("POST", "/v1/responses", json=body).json()
    assert whole["output"][0]["content"] == response["output"][0]["content"]


def test_a_small_answer_has_its_length(gateway: Gateway) -> None:
    answer = gateway.chat(max_tokens=5)
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_the_line_of_a_batch_is_the_same_however_large_it_is() -> None:
    entries = [{"token": "ü\u2028😀", "logprob": -0.5, "bytes": [at]} for at in range(9_000)]
    body = {"choices": iter([{"logprobs": {"content": iter(entries)}}]), "usage": {"completion_tokens": 9_000}}
    line = answered_line(7, "seven", "req-a", 200, body)
    assert (line.line, line.is_ok, line.output_tokens) == (7, True, 9_000)
    assert line.text.isascii()
    assert json.loads(line.text)["response"]["body"]["choices"] == [{"logprobs": {"content": entries}}]


@pytest.mark.parametrize(
    "tree",
    [
        {},
        [],
        {"a": [], "b": {}, "c": None, "d": [[], [1], {"e": [2.5, True]}]},
        [*range(1_000)],
        {"ü": '\u2028\x00"\\😀', "long": [{"n": at} for at in range(100)]},
    ],
)
def test_parts_are_the_json_of_their_tree(tree: Any) -> None:
    written = b"".join(json_parts(tree))
    assert json.loads(written) == tree
    assert json.loads(ascii_json(written)) == tree
    assert ascii_json(written) == json.dumps(tree, separators=(",", ":"))


def test_iterators_are_written_as_lists() -> None:
    tree = {"none": iter(()), "some": ({"at": at, "of": iter("ab")} for at in range(2))}
    assert json.loads(b"".join(json_parts(tree))) == {
        "none": [],
        "some": [{"at": at, "of": ["a", "b"]} for at in (0, 1)],
    }


# --- The limit

UNLIMITED = Limits()
PROMISE = ServicePromise(ServiceClass.RT, Slo(), "default")


def made(text: TextModel, kind: Any, fields: dict[str, Any], limits: Limits = UNLIMITED, context: int = 9_000) -> int:
    body = parse_body(kind, json.dumps({"model": MODEL, **fields}).encode())
    return len(
        make_requests(body, PROMISE, Origin("req-a", "gateway-0", 0.0, Caller("ann", limits=limits)), text, context)
    )


def chat(n: int, max_tokens: int | None, top: int | None, **more: Any) -> dict[str, Any]:
    asked = {} if top is None else {"logprobs": True, "top_logprobs": top}
    return {"messages": MESSAGES, "n": n, "max_tokens": max_tokens, **asked, **more}


def test_an_answer_may_have_only_so_many_log_probabilities(text: TextModel) -> None:
    for asked in (chat(1, 8_192, 20), chat(16, 1_000, 5), chat(128, 200, 20), chat(128, 8_000, None)):
        assert made(text, ChatRequest, asked) == asked["n"]
    assert made(text, ChatRequest, chat(128, 600, 20, stream=True)) == 128, "a stream is sent as it comes"
    with pytest.raises(ApiError) as refused:
        made(text, ChatRequest, chat(128, 600, 20))
    assert (refused.value.status, refused.value.param) == (400, "logprobs")
    for number in ("128 choices", "600 tokens", "21 log-probabilities", "1612800", "1048576"):
        assert number in refused.value.message
    with pytest.raises(ApiError, match="max_tokens"):
        made(text, ChatRequest, chat(64, None, 5))


def test_prompts_that_are_repeated_count_too(text: TextModel) -> None:
    echoed = {"prompt": [[5] * 2_000] * 30, "max_tokens": 1, "echo": True, "stream": True}
    assert made(text, CompletionRequest, {**echoed, "logprobs": 5}) == 30
    with pytest.raises(ApiError, match="1260000"):
        made(text, CompletionRequest, {**echoed, "logprobs": 20})


def test_a_key_may_have_a_limit_of_its_own(text: TextModel) -> None:
    assert made(text, ChatRequest, chat(128, 600, 20), Limits(most_logprobs=2_000_000)) == 128
    gateway = Gateway(
        text, FakeOwner((5,)), keys=KeyRing([KeyEntry("ann", hash_key("ann"), limits=Limits(most_logprobs=100))])
    )
    body = {"model": MODEL, **chat(2, 3, 20)}
    answer = gateway.ask("POST", "/v1/chat/completions", json=body, headers={"Authorization": "Bearer ann"})
    assert answer.status_code == 400
    assert "126" in answer.json()["error"]["message"]
    assert "100" in answer.json()["error"]["message"]
