"""Tests that a body with very many errors is checked once: it costs neither seconds nor gigabytes."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from pydantic import ValidationError

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.http.limits import LOOP_AT_ONCE_S, LOOP_FREE_S, LOOP_SHARE, LoopPace
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.strict import LARGE_BYTES, MOST_BRACKETS, parse_body
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import PATIENT_S, FakeOwner, Gateway

MANY = 20_000
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "Hi"}
NAMED = {str(number): "a" for number in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {**CHAT, "messages": [{}] * MANY}),
        (ChatRequest, {**CHAT, "messages": [[]] * MANY}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": ""}] * MANY}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": "", **NAMED}]}),
        (ChatRequest, {**CHAT, **NAMED}),
        (ChatRequest, {**CHAT, "metadata": NAMED}),
        (ChatRequest, {**CHAT, "logit_bias": NAMED}),
        (ChatRequest, {**CHAT, "stop": [5] * MANY}),
        (ChatRequest, {**CHAT, "stop_token_ids": [""] * MANY}),
        (ChatRequest, {**CHAT, "allowed_token_ids": [-1] * MANY}),
        (ChatRequest, {**CHAT, "guided_choice": [""] * MANY}),
        (CompletionRequest, {**COMPLETION, "prompt": [{}] * MANY}),
        (CompletionRequest, {**COMPLETION, "prompt": [5] + [{}] * MANY}),
        (CompletionRequest, {**COMPLETION, "prompt": [[1]] + [[]] * MANY}),
        (CompletionRequest, {**COMPLETION, "prompt": [[1] + [-1] * MANY]}),
        (CompletionRequest, {**COMPLETION, "prompt": ["a"] * MANY}),
    ],
    ids=lambda given: json.dumps(given)[:60] if isinstance(given, dict) else given.__name__,
)
def test_few_faults_are_written_down(kind: type[ChatRequest | CompletionRequest], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 3


def test_large_bodies_are_parsed_in_turn_and_small_bodies_meanwhile(
    text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, most = [0], threading.Event(), [0]
    encode = TextModel.prompt_ids

    def slow(self: TextModel, written: str, with_special: bool = True) -> list[int]:
        if written.startswith("large"):
            begun[0] += 1
            most[0] = max(most[0], begun[0])
            assert go_on.wait(PATIENT_S)
            begun[0] -= 1
        return encode(self, written, with_special)

    monkeypatch.setattr(TextModel, "prompt_ids", slow)
    gateway = Gateway(text, FakeOwner((5,), (2,)))
    large = {**COMPLETION, "prompt": "large", "user": "a" * LARGE_BYTES}

    async def asked() -> None:
        async with gateway.client() as client:
            waiting = [asyncio.create_task(client.post("/v1/completions", json=large)) for _ in range(4)]
            while not begun[0]:
                await asyncio.sleep(0.001)
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
            go_on.set()
            assert [(await answer).status_code for answer in waiting] == [200] * 4

    asyncio.run(asyncio.wait_for(asked(), PATIENT_S))
    assert most == [1]


def test_a_body_of_very_many_lists_is_refused_before_it_is_parsed() -> None:
    many = {**COMPLETION, "prompt": [[1]] * MOST_BRACKETS}
    with pytest.raises(ApiError, match="more than 131072 brackets"):
        parse_body(CompletionRequest, json.dumps(many).encode())


def test_a_caller_waits_for_what_its_bodies_took_of_the_event_loop_and_no_other_does() -> None:
    pace = LoopPace(lambda: 100.0)

    def slow() -> int:
        until = time.thread_time() + LOOP_AT_ONCE_S + 0.01 + LOOP_FREE_S
        while time.thread_time() < until:
            pass
        return 5

    async def parsed() -> int:
        async with pace.turn("ann"):
            return pace.measured("ann", slow)

    assert asyncio.run(parsed()) == 5
    assert pace.wait_s("ann", 0.0) >= 0.01 / LOOP_SHARE - 1e-6
    assert pace.wait_s("bob", 0.0) == 0.0


def test_long_bodies_alone_are_paced(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    took_s, long = list[float](), {**COMPLETION, "prompt": [5] * 120_000}

    def noted(_: LoopPace, __: str, amount: float) -> float:
        took_s.append(amount)
        return 0.0

    monkeypatch.setattr(LoopPace, "wait_s", noted)
    gateway = Gateway(text, FakeOwner((5,), (2,)))

    async def asked() -> None:
        async with gateway.client() as client:
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
            assert (await client.post("/v1/completions", json=long)).status_code == 400

    asyncio.run(asyncio.wait_for(asked(), PATIENT_S))
    waited_s, parsed_s = took_s
    assert waited_s == 0.0
    assert parsed_s > 0.0


@pytest.mark.parametrize("body", [b"{}", b"[" * LARGE_BYTES, b" " * LARGE_BYTES + json.dumps(CHAT).encode()])
def test_the_collector_goes_on_after_a_body(body: bytes) -> None:
    with suppress(AlignedServeError):
        parse_body(ChatRequest, body)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
