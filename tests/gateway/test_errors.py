"""Tests that every error has OpenAI's shape and names the wrong field."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.choices import MetricsPrefix
from alignedserve.core import FinishReason
from alignedserve.gateway.access.keys import key_ring
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest, TokenizeRequest
from alignedserve.owner.client import Culprit, Delivered, GivenUp, Overloaded
from alignedserve.text.text_model import TextModel
from tests.exposition import value
from tests.gateway.conftest import MODEL, MOST, PATIENT_S, FakeOwner, Gateway, data_lines

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALL_OF_NOTHING = {**CALL, "function": {"name": "f", "arguments": 1}}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(text, FakeOwner((5,), (2,)), body_limit_bytes=10_000)


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert answer.headers["x-request-id"].startswith("req-")
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "odd", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [USER, {**USER, "name": 1}]}, "messages[1].name"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls[0].type"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL_OF_NOTHING]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{**USER, "odd": 1}]}, "messages[0].odd"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**63}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"n": 129}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [5, True]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"min_p": 1.01}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logit_bias": {"Hi": 1}}, "logit_bias.Hi"),
        ({"logit_bias": {"05": 1}}, "logit_bias.05"),
        ({"logit_bias": {"-5": 1}}, "logit_bias.-5"),
        ({"logit_bias": {"2048": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [2048]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["yes", ""]}, "guided_choice[1]"),
        ({"guided_choice": ["yes"], "structured_outputs": {"choice": ["no"]}}, "guided_choice"),
        ({"guided_choice": ["yes"], "ignore_eos": True}, "guided_choice"),
        ({"guided_choice": ["yes"], "min_tokens": 2}, "min_tokens"),
        ({"guided_choice": ["yes"], "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": ["yes"]}, "ignore_eos": True}, "structured_outputs.choice"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"odd": 1}, "odd"),
        ({"prompt": "Hi"}, "prompt"),
    ],
)
def test_a_wrong_field_is_named(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    error = error_of(gateway.chat(**fields), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert gateway.owner.opened == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": [5, True]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2048]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a", ""] * 513}, "prompt"),
        ({"prompt": [[1], [2]] * 5, "n": 128}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        ({"echo": 1}, "echo"),
        ({"suffix": ["x"]}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"messages": [USER]}, "messages"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 5}, "min_tokens"),
    ],
)
def test_so_it_is_for_completions(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    assert error_of(gateway.complete(**fields), 400)["param"] == param
    assert gateway.owner.opened == []


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"prompt_logprobs": 1},
        {"bad_words": ["a"]},
        {"chat_template": "{{ x }}"},
    ],
)
def test_what_is_not_supported_is_refused_by_name(gateway: Gateway, fields: dict[str, Any]) -> None:
    error = error_of(gateway.chat(**fields), 400)
    (name,) = fields
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"] == f"{name} is not supported yet: leave it out"


def test_what_asks_for_nothing_special_is_taken(gateway: Gateway) -> None:
    usual = {
        "stop": [],
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "service_tier": "auto",
        "n": 1,
        "parallel_tool_calls": True,
        "skip_special_tokens": True,
        "reasoning_effort": None,
        "store": False,
    }
    assert gateway.chat(**usual).status_code == 200


def test_every_field_of_the_sdk_is_known(gateway: Gateway) -> None:
    """Each field is supported, or refused as not supported yet, but never refused as unknown."""
    from openai.types import completion_create_params as completion
    from openai.types.chat import completion_create_params as chat

    fields = {
        "chat": chat.CompletionCreateParamsBase.__annotations__,
        "complete": completion.CompletionCreateParamsBase.__annotations__,
    }
    supported = {"chat": set(ChatRequest.model_fields), "complete": set(CompletionRequest.model_fields)}
    for route, known in fields.items():
        for name in set(known) - supported[route]:
            assert error_of(getattr(gateway, route)(**{name: "odd"}), 400)["code"] == "unsupported_parameter", name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "demo",}',
        b"[]",
        b"5",
        b"null",
        b'"demo"',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 5000,
        b'{"model": ' + b'{"a": ' * 600 + b"1" + b"}" * 601,
    ],
)
def test_a_body_that_is_no_request_is_refused(gateway: Gateway, body: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        error = error_of(gateway.ask("POST", path, content=body), 400)
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"],
)
def test_what_is_no_finite_number_is_refused_by_name(gateway: Gateway, name: str, number: str) -> None:
    """JSON has no NaN, but many clients write it."""
    body = json.dumps({"model": MODEL, "messages": [USER], name: 0}).replace(": 0}", f": {number}}}")
    assert error_of(gateway.ask("POST", CHAT, content=body.encode()), 400)["param"] == name
    biased = json.dumps({"model": MODEL, "messages": [USER], "logit_bias": {"5": 0}}).replace(": 0}", f": {number}}}")
    assert error_of(gateway.ask("POST", CHAT, content=biased.encode()), 400)["param"] == "logit_bias.5"
    assert gateway.owner.opened == []


def test_a_number_too_large_for_a_float_is_refused(gateway: Gateway) -> None:
    body = json.dumps({"model": MODEL, "messages": [USER], "temperature": 0}).replace("0}", "1" + "0" * 400 + "}")
    assert error_of(gateway.ask("POST", CHAT, content=body.encode()), 400)["param"] == "temperature"


def test_a_wrong_model_is_not_found(gateway: Gateway) -> None:
    for answer in (gateway.chat(model="other"), gateway.complete(model=""), gateway.get("/v1/models/other")):
        error = error_of(answer, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("num_prompt", "fields", "too_long"),
    [
        (MOST - 1, {}, None),
        (MOST, {}, "prompt"),
        (MOST + 1, {}, "prompt"),
        (MOST, {"max_tokens": 1}, "prompt"),
        (MOST - 10, {"max_tokens": 10}, None),
        (MOST - 10, {"max_tokens": 11}, None),
        (1, {"max_tokens": 10**30}, None),
    ],
)
def test_a_prompt_must_fit_and_its_output_gets_what_is_left(
    gateway: Gateway, num_prompt: int, fields: dict[str, Any], too_long: str | None
) -> None:
    answer = gateway.complete(prompt=[5] * num_prompt, **fields)
    if too_long is None:
        assert answer.status_code == 200
        assert gateway.owner.opened[0].most_tokens == MOST
    else:
        error = error_of(answer, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", too_long)
        assert f"maximum context length is {MOST} tokens" in error["message"]


def test_a_long_chat_is_too_long_by_its_messages(gateway: Gateway) -> None:
    error = error_of(gateway.chat(messages=[{**USER, "content": "7" * 1000}]), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_who_asks_for_more_than_is_left_is_told_how_much_that_is(gateway: Gateway, field: str, streams: bool) -> None:
    answer = gateway.chat(**{field: 10**9, "stream": streams})
    (request,) = gateway.owner.opened
    assert answer.status_code == 200
    assert answer.headers["x-max-tokens"] == str(request.max_tokens) == str(MOST - len(request.prompt))


def test_of_several_prompts_the_longest_leaves_least(gateway: Gateway) -> None:
    answer = gateway.complete(prompt=[[5] * 6, [5] * 56], max_tokens=MOST)
    assert answer.headers["x-max-tokens"] == str(MOST - 56)


def test_who_asks_for_what_is_left_is_told_nothing(gateway: Gateway) -> None:
    for fields in ({}, {"max_tokens": MOST - 10}, {"max_tokens": 0, "echo": True}):
        assert "x-max-tokens" not in gateway.complete(prompt=[5] * 10, **fields).headers


def test_a_large_body_is_refused_before_it_is_read(gateway: Gateway) -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 1000

    for content in (b" " * 10_001, endless()):
        error = error_of(gateway.ask("POST", CHAT, content=content), 413)
        assert error["code"] == "request_too_large"
    assert error_of(gateway.ask("POST", CHAT, content=b" " * 10_000), 400)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("PUT", COMPLETIONS, 405),
        ("DELETE", f"/v1/models/{MODEL}", 405),
        ("POST", "/health", 405),
        ("POST", "/", 405),
        ("GET", "/redoc", 404),
        ("POST", "/v1/images/generations", 404),
        ("POST", f"{CHAT}/", 404),
        ("GET", "/v1/models/", 404),
    ],
)
def test_a_wrong_door_is_named(gateway: Gateway, method: str, path: str, status: int) -> None:
    answer = gateway.ask(method, path)
    assert path in error_of(answer, status)["message"] or path == "/v1/models/"
    if status == 405:
        assert answer.headers["allow"]


def test_a_key_opens_all_but_what_is_open(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((5,), (2,)), keys=key_ring("s3cret-é", None))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret-é".encode()}):
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/nowhere")):
            answer = gateway.ask(method, path, headers=headers)
            error = error_of(answer, 401)
            assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
            assert answer.headers["www-authenticate"] == "Bearer"
    assert gateway.get("/v1/models", headers={"Authorization": "Bearer s3cret-é".encode()}).status_code == 200
    assert [gateway.get(path).status_code for path in ("/live", "/health", "/ready", "/metrics")] == [200] * 3 + [401]


@pytest.mark.parametrize("stream", [False, True])
def test_overload_says_when_to_come_back(text: TextModel, stream: bool) -> None:
    gateway = Gateway(text, FakeOwner(Overloaded("the queue is full", 2.2)))
    answer = gateway.chat(stream=stream)
    error = error_of(answer, 429)
    assert (error["message"], error["type"]) == ("the queue is full", "rate_limit_error")
    assert answer.headers["retry-after"] == "3"
    assert gateway.metric('alignedserve:num_requests_open{class="rt"}') == 0
    assert "request_success_total{" not in gateway.get("/metrics").text
    assert gateway.metric('alignedserve:admission_rejections_total{class="rt",reason="too_late"}') == 1


def test_a_probe_that_finds_nothing_ready_counts_as_no_error(text: TextModel) -> None:
    owner = FakeOwner()
    owner.ready = False
    gateway = Gateway(text, owner)
    assert gateway.get("/ready").status_code == 503
    assert "http_errors_total{" not in gateway.get("/metrics").text


def test_metrics_may_have_vllms_prefix(text: TextModel, hello: tuple[int, ...]) -> None:
    gateway = Gateway(text, FakeOwner(hello), metrics_prefix=MetricsPrefix.VLLM)
    gateway.chat(max_tokens=2)
    shown = gateway.get("/metrics").text
    assert value(shown, f'vllm:e2e_request_latency_seconds_count{{class="rt",model_name="{MODEL}"}}') == 1
    assert "alignedserve:" not in shown


def test_what_comes_to_nothing_is_for_want_of_capacity(text: TextModel) -> None:
    answer = Gateway(text, FakeOwner(GivenUp("10 attempts in a row came to nothing", 10.0))).chat()
    assert error_of(answer, 503)["code"] == "server_is_overloaded"
    assert answer.headers["retry-after"] == "10"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_ends_its_workers_is_not_to_be_sent_again(text: TextModel, stream: bool) -> None:
    answer = Gateway(text, FakeOwner(Culprit("3 workers ended"))).chat(stream=stream)
    error = error_of(answer, 500)
    assert (error["code"], error["type"]) == ("request_ends_workers", "internal_server_error")
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    later = Gateway(text, FakeOwner((5,), Culprit("3 workers ended")))
    *_, last, done = data_lines(later.chat(stream=True))
    assert (last["error"]["code"], done) == ("request_ends_workers", "[DONE]")


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_cannot_be_chosen_is_our_fault(text: TextModel, stream: bool) -> None:
    gateway = Gateway(text, FakeOwner(Delivered((), FinishReason.ERROR)))
    error = error_of(gateway.chat(stream=stream), 500)
    assert (error["code"], error["type"]) == ("generation_failed", "internal_server_error")
    later = Gateway(text, FakeOwner((5,), Delivered((), FinishReason.ERROR)))
    *_, last, done = data_lines(later.chat(stream=True))
    assert (last["error"]["code"], done) == ("generation_failed", "[DONE]")
    assert error_of(later.chat(), 500)["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [(KeyError("secret"),), ()], ids=["a bug", "no finish"])
def test_an_inner_fault_stays_inside(
    text: TextModel, stream: bool, steps: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    answer = Gateway(text, FakeOwner(*steps)).chat(stream=stream)
    error = error_of(answer, 500)
    assert error["type"] == "internal_server_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in caplog.text


def test_a_template_that_refuses_is_the_clients_fault(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    from alignedserve.errors import PromptError
    from alignedserve.text.chat_template import ChatTemplate

    def refuse(*_: object) -> list[int]:
        raise PromptError("the model's chat template refuses these messages: roles must alternate")

    monkeypatch.setattr(ChatTemplate, "token_ids", refuse)
    error = error_of(gateway.chat(), 400)
    assert error["param"] == "messages"
    assert re.search("roles must alternate$", error["message"])


def test_tokenising_does_not_hold_up_the_others(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake encoder returns only once the event loop has answered another request."""
    go_on = threading.Event()
    encode = TextModel.chat_ids

    def slow(self: TextModel, *asked: Any) -> list[int]:
        assert go_on.wait(PATIENT_S)
        return encode(self, *asked)

    monkeypatch.setattr(TextModel, "chat_ids", slow)
    gateway = Gateway(text, FakeOwner((2,)))

    async def both() -> None:
        async with gateway.client() as client:
            waiting = asyncio.create_task(client.post(CHAT, json={"model": MODEL, "messages": [USER]}))
            await asyncio.sleep(0.01)
            assert (await client.get("/health")).status_code == 200
            go_on.set()
            assert (await waiting).status_code == 200

    asyncio.run(asyncio.wait_for(both(), PATIENT_S))


def test_a_long_text_lets_other_threads_run(text: TextModel) -> None:
    """The library's `encode` holds Python's lock during its whole run, which would stop our heartbeats."""
    words, stalls, done, clock = "word " * 150_000, [0.0], threading.Event(), time.process_time

    def beat() -> None:
        before = clock()
        while not done.wait(0.001):
            now = clock()  # CPU time of all threads together: it stands still while other processes have the cores
            stalls.append(now - before)
            before = now

    beating = threading.Thread(target=beat)
    beating.start()
    began = clock()
    text.prompt_ids(words)
    text.chat_ids([{"role": "user", "content": words}])
    took = clock() - began
    done.set()
    beating.join()
    assert max(stalls) < took / 4


def test_every_field_is_in_the_docs() -> None:
    """A generated page has what is ignored and refused."""
    docs = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    fields = {**ChatRequest.model_fields, **CompletionRequest.model_fields, **TokenizeRequest.model_fields}
    honoured = [name for name, field in fields.items() if "ignored" not in field.metadata]
    assert [name for name in honoured if not re.search(rf"[`.]{name}[`.:]", docs)] == []
