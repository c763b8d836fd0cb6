"""Tests of the routes as a client sees them: answers, streams, and routes that generate nothing."""

from __future__ import annotations

import asyncio
import math
from datetime import datetime
from typing import Any

import pytest
from httpx import Response

from alignedserve.core import FinishReason, Opening, Sampling, ServiceClass
from alignedserve.gateway.access.keys import key_ring
from alignedserve.gateway.starting import PATIENCE_S
from alignedserve.owner.client import Delivered, GivenUp, Overloaded
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, MOST, PATIENT_S, FakeOwner, Gateway, data_lines, ids_of, log_lines

HELLO = "Hello, naïve 😀!"


def one_by_one(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(token,) for token in tokens]


@pytest.fixture
def gateway(text: TextModel, hello: tuple[int, ...]) -> Gateway:
    return Gateway(text, FakeOwner(*one_by_one(hello)))


def test_a_chat_is_answered(gateway: Gateway, hello: tuple[int, ...]) -> None:
    answer = gateway.chat().json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    choice = {"index": 0, "logprobs": None, "finish_reason": "stop"}
    message = {"role": "assistant", "content": HELLO, "refusal": None}
    assert answer["choices"] == [{**choice, "message": message}]
    prompt = len(gateway.owner.opened[0].prompt)
    usage = {"prompt_tokens": prompt, "completion_tokens": len(hello), "total_tokens": prompt + len(hello)}
    assert answer["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
    assert gateway.owner.cancelled == []


def test_a_completion_is_answered(gateway: Gateway) -> None:
    answer = gateway.complete().json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "logprobs": None, "finish_reason": "stop", "text": HELLO}]


def test_a_limit_ends_an_answer(gateway: Gateway) -> None:
    choice = gateway.complete(max_tokens=2).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello,", "length")


def test_the_owner_gets_the_request_as_it_was_meant(gateway: Gateway, text: TextModel) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": -3, "max_completion_tokens": 9}
    gateway.chat(**fields, stop_token_ids=[44, 2], user="u", metadata={"a": "b"})
    request = gateway.owner.opened[0]
    assert request.sampling == Sampling(0.5, 7, 0.9, -3)
    assert (request.max_tokens, request.stop_tokens, request.owner) == (9, (44, 2), "gateway-0")
    assert (request.service, request.attempt, request.emitted) == (ServiceClass.RT, 0, ())
    assert request.prompt == tuple(text.chat_ids([{"role": "user", "content": "Hi"}]))


def test_what_a_request_does_not_say_is_the_models_or_openais(gateway: Gateway) -> None:
    nothing = ("temperature", "top_p", "seed", "max_tokens", "stream", "stop", "tools", "n", "stream_options")
    gateway.chat(**dict.fromkeys(nothing))
    gateway.chat(ignore_eos=True, top_k=-1)
    first, second = gateway.owner.opened
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0.0, 0, 1.0)
    assert (first.max_tokens, first.stop_tokens) == (MOST - len(first.prompt), (2,))
    assert (second.stop_tokens, second.sampling.top_k) == ((), 0)
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"]])
def test_a_prompt_of_text_gets_the_beginning(gateway: Gateway, text: TextModel, prompt: Any) -> None:
    gateway.complete(prompt=prompt)
    assert gateway.owner.opened[0].prompt == (1, *ids_of(text, "Hi"))


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]]])
def test_a_prompt_of_tokens_is_taken_as_it_is(gateway: Gateway, prompt: Any) -> None:
    gateway.complete(prompt=prompt)
    assert gateway.owner.opened[0].prompt == (5, 6)


def test_a_content_may_be_parts(gateway: Gateway, text: TextModel) -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    gateway.chat(messages=[{"role": "user", "content": parts}])
    expected = text.chat_ids([{"role": "user", "content": "One.\nTwo."}])
    assert gateway.owner.opened[0].prompt == tuple(expected)


def test_the_answer_of_one_turn_may_be_sent_back_in_the_next(gateway: Gateway) -> None:
    said: dict[str, Any] = {"role": "assistant", "content": "Hello"}
    said |= {"refusal": None, "tool_calls": None, "annotations": []}
    assert gateway.chat(messages=[said, {"role": "user", "content": "Hi"}]).status_code == 200


# --- Streams


def test_a_chat_is_streamed(gateway: Gateway) -> None:
    streamed = gateway.chat(stream=True)
    assert streamed.headers["content-type"].split(";")[0] == "text/event-stream"
    assert "content-length" not in streamed.headers
    *chunks, done = data_lines(streamed)
    assert done == "[DONE]"
    assert {(chunk["object"], chunk["id"]) for chunk in chunks} == {("chat.completion.chunk", chunks[0]["id"])}
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == HELLO
    assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "stop"]
    assert gateway.owner.cancelled == []


def test_a_completion_is_streamed(gateway: Gateway) -> None:
    *chunks, done = data_lines(gateway.complete(stream=True))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == HELLO
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_usage_comes_in_a_chunk_of_its_own(gateway: Gateway, hello: tuple[int, ...], route: str) -> None:
    *chunks, last, _ = data_lines(getattr(gateway, route)(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(hello)


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_usage_says_what_of_the_prompt_the_pool_had(text: TextModel, route: str) -> None:
    def ask(**given: Any) -> Response:
        pieces = Delivered((300,), None, opening=Opening(num_cached=3)), Delivered((301,), FinishReason.LENGTH)
        gateway = Gateway(text, FakeOwner(*pieces))
        answered: Response = getattr(gateway, route)(**given)
        assert gateway.metric('alignedserve:prompt_tokens_cached_total{class="rt"}') == 3
        assert gateway.metric('alignedserve:prefix_cache_hits_total{class="rt"}') == 3
        return answered

    *_, last, _ = data_lines(ask(stream=True, stream_options={"include_usage": True}))
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert ask().json()["usage"] == last["usage"]


def test_no_chunk_has_half_a_character(gateway: Gateway) -> None:
    *chunks, _ = data_lines(gateway.complete(stream=True))
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert not any("\ufffd" in written for written in texts)
    assert "" not in texts[:-1]


def test_a_stream_is_ascii(gateway: Gateway) -> None:
    assert gateway.complete(stream=True).content.isascii()


def test_token_ids_are_returned_where_vllm_has_them(gateway: Gateway, hello: tuple[int, ...]) -> None:
    chat, completion = gateway.chat(return_token_ids=True).json(), gateway.complete(return_token_ids=True).json()
    assert (chat["prompt_token_ids"], completion["choices"][0]["prompt_token_ids"]) == tuple(
        list(request.prompt) for request in gateway.owner.opened
    )
    assert chat["choices"][0]["token_ids"] == completion["choices"][0]["token_ids"] == list(hello)


def test_token_ids_are_streamed_though_their_text_is_held_back(gateway: Gateway, hello: tuple[int, ...]) -> None:
    first, *chunks, _ = data_lines(gateway.chat(stream=True, return_token_ids=True))
    assert first["prompt_token_ids"] == list(gateway.owner.opened[0].prompt)
    assert first["choices"][0]["token_ids"] == []
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[token] for token in hello]
    first, *chunks, _ = data_lines(gateway.complete(stream=True, return_token_ids=True))
    assert first["choices"][0]["prompt_token_ids"] == list(gateway.owner.opened[1].prompt)
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in chunks)
    ids = [token for chunk in (first, *chunks) for token in chunk["choices"][0]["token_ids"]]
    assert ids == list(hello)


@pytest.mark.parametrize(
    ("fault", "message"),
    [(RuntimeError("secret"), "internal error"), (Overloaded("no worker is left", 1.0), "no worker is left")],
)
def test_a_fault_in_a_stream_is_its_last_event(text: TextModel, fault: Exception, message: str) -> None:
    gateway = Gateway(text, FakeOwner((5,), fault))
    streamed = gateway.chat(stream=True, stream_options={"include_usage": True})
    *_, error, done = data_lines(streamed)
    assert (streamed.status_code, done) == (200, "[DONE]")
    assert error["error"]["message"].startswith(message)
    assert "secret" not in streamed.text
    assert gateway.owner.open_now == set()


# --- Routes that generate nothing


def test_models_are_listed_with_their_length(gateway: Gateway) -> None:
    listed = gateway.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in listed["data"]] == [(MODEL, "model", MOST)]
    (card,) = listed["data"]  # and what Anthropic's clients look for
    assert (card["type"], card["display_name"], listed["has_more"]) == ("model", MODEL, False)
    assert listed["first_id"] == listed["last_id"] == MODEL
    assert datetime.fromisoformat(card["created_at"].replace("Z", "+00:00")).timestamp() == card["created"]
    assert gateway.get(f"/v1/models/{MODEL}").json() == listed["data"][0]


def test_a_model_may_have_a_name_with_slashes(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner(), served_model_names=("us/demo", "demo"))
    assert gateway.get("/v1/models/us/demo").json()["id"] == "us/demo"


def test_a_model_has_other_names_and_names_for_many(text: TextModel, hello: tuple[int, ...]) -> None:
    gateway = Gateway(text, FakeOwner(hello), served_model_names=("qwen", "second", "claude-*"))
    assert [card["id"] for card in gateway.get("/v1/models").json()["data"]] == ["qwen", "second"]
    assert gateway.get("/status").json()["models"] == ["qwen", "second"]
    for name in ("qwen", "second", "claude-sonnet-4-5", "/models/qwen.gguf"):
        answer = gateway.chat(model=name)
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert gateway.get(f"/v1/models/{name}").json()["id"] == name
    assert gateway.chat(model="clau").status_code == 404


def test_without_workers_requests_wait_for_them_and_then_are_refused(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((5,), (2,)))
    gateway.owner.ready = False
    answers = []
    for lacks_s in (PATIENCE_S - 1, PATIENCE_S + 1, math.inf):
        gateway.owner.lacks_s = lacks_s
        answers.append(gateway.complete())
    assert [answer.status_code for answer in answers] == [200, 503, 503]
    assert (answers[1].json()["error"]["code"], answers[1].headers["retry-after"]) == ("not_ready", "1")


def test_a_draining_gateway_ends_what_is_open_and_takes_nothing_new(text: TextModel) -> None:
    async def drained() -> None:
        go_on = asyncio.Event()
        gateway = Gateway(text, FakeOwner((5,), go_on, (2,)))
        body = {"model": MODEL, "prompt": "Hi"}
        async with gateway.client() as client:
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            while not gateway.owner.open_now:
                await asyncio.sleep(0.001)
            gateway.app.state.draining = True
            refused, probed = await client.post("/v1/completions", json=body), await client.get("/ready")
            go_on.set()
            assert (refused.status_code, probed.status_code) == (503, 503)
            assert int(refused.headers["retry-after"]) > 0
            assert (await running).status_code == 200
            assert (await client.get("/health")).status_code == 200

    asyncio.run(asyncio.wait_for(drained(), PATIENT_S))


def test_health_is_whether_requests_are_served_and_live_whether_the_process_answers(gateway: Gateway) -> None:
    """Scripts of vLLM's clients wait for /health before they ask; what supervises processes asks /live."""
    gateway.owner.ready = False
    assert [gateway.get(path).status_code for path in ("/live", "/health", "/ready")] == [200, 503, 503]
    assert gateway.get("/health").json()["error"]["code"] == "not_ready"
    gateway.owner.ready = True
    assert [gateway.get(path).status_code for path in ("/live", "/health", "/ready")] == [200, 200, 200]


def test_every_answer_has_an_id_of_ours(gateway: Gateway) -> None:
    answers = [gateway.get(path) for path in ("/health", "/v1/models", "/nowhere")]
    ids = [answer.headers.get_list("x-request-id") for answer in [*answers, gateway.chat(), gateway.chat(stream=True)]]
    assert all(len(given) == 1 and given[0].startswith("req-") for given in ids)
    assert len({given[0] for given in ids}) == 5
    assert [given[0] for given in ids[-2:]] == [request.id for request in gateway.owner.opened]


def test_an_id_of_the_clients_comes_back_and_is_in_the_log(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with log_lines(caplog) as lines:
        answers = [gateway.get("/v1/models", headers={"x-request-id": "mine-7"}) for _ in range(2)]
    assert [answer.headers.get_list("x-request-id") for answer in answers] == [["mine-7"]] * 2
    assert [line["client_request_id"] for line in lines] == ["mine-7"] * 2
    assert len({line["request_id"] for line in lines}) == 2


@pytest.mark.parametrize("odd", [b"", b"a b", b"x" * 129, b"caf\xc3\xa9", b'{"prompt":"Hi"}'])
def test_an_id_that_is_none_is_not_taken(gateway: Gateway, odd: bytes) -> None:
    answer = gateway.get("/v1/models", headers={b"x-request-id": odd})
    assert answer.headers["x-request-id"].startswith("req-")


# --- Metrics


def test_what_happened_is_counted(gateway: Gateway, hello: tuple[int, ...]) -> None:
    gateway.chat()
    gateway.chat(max_tokens=2, stream=True)
    gateway.get("/nowhere")
    prompt = sum(len(request.prompt) for request in gateway.owner.opened)
    counted = {
        'request_success_total{class="rt",finished_reason="stop"}': 1,
        'request_success_total{class="rt",finished_reason="length"}': 1,
        'prompt_tokens_total{class="rt"}': prompt,
        'prompt_tokens_cached_total{class="rt"}': 0,
        'prefix_cache_queries_total{class="rt"}': prompt,
        'prefix_cache_hits_total{class="rt"}': 0,
        'generation_tokens_total{class="rt"}': len(hello) + 2,
        'num_requests_open{class="rt"}': 0,
        'time_to_first_token_seconds_count{class="rt"}': 2,
        'inter_token_latency_seconds_count{class="rt"}': len(hello) - 1 + 1,
        'http_errors_total{status="404"}': 1,
    }
    assert {name: gateway.metric(f"alignedserve:{name}") for name in counted} == counted


def test_two_gateways_count_for_themselves(gateway: Gateway, text: TextModel) -> None:
    gateway.chat()
    assert "request_success_total{" not in Gateway(text, FakeOwner()).get("/metrics").text


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/models/xyzzy", "/v1/models/{name}"),
        ("/v1/requests/xyzzy/timeline", "/v1/requests/{id}/timeline"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/xyzzy", None),
    ],
)
@pytest.mark.parametrize("key", [None, "of another"])
def test_a_line_tells_the_route_and_not_what_a_client_writes_in_it(
    text: TextModel, caplog: pytest.LogCaptureFixture, path: str, route: str | None, key: str | None
) -> None:
    gateway = Gateway(text, FakeOwner(), keys=key_ring(key, None))
    with log_lines(caplog) as lines:
        gateway.get(f"{path}?xyzzy=xyzzy", headers={"x-request-id": "the xyzzy"})
    (line,) = lines
    assert (line["path"] or "").replace(":path", "") == (route or "")
    assert "xyzzy" not in str(lines)


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        (
            {"messages": [{"role": "user", "content": "xyzzy " * 300}]},
            "this model's maximum context length is 256 tokens",
            "context_length_exceeded",
        ),
        ({"temperature": 9}, "temperature: Input should be less than or equal to 2", "invalid_value"),
        ({"temperature": "xyzzy"}, "temperature: Input should be a valid number", "invalid_value"),
        ({"xyzzy": "xyzzy"}, "there is no such field", "unknown_parameter"),
        ({"logit_bias": {"xyzzy": 1}}, "logit_bias: its names must be token ids", "invalid_value"),
        ({"model": "xyzzy"}, "no model of this name is served here", "model_not_found"),
        ({"guided_regex": "(xyzzy"}, "guided_regex cannot be followed", "invalid_value"),
        ({"messages": [{"role": "xyzzy", "content": "a"}]}, "messages: Input should be...", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages: its content is missing", "missing_required_parameter"),
        ({"messages": [{"content": "xyzzy"}]}, "messages: its role is missing", "missing_required_parameter"),
    ],
)
def test_the_line_of_an_error_says_why_without_a_clients_words(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], error: str, code: str | None
) -> None:
    with log_lines(caplog) as lines:
        gateway.chat(**fields)
    (line,) = lines
    assert line["error"].startswith(error)
    assert len(line["error"]) <= 303
    assert line["code"] == code
    assert "xyzzy" not in str(lines)


def test_an_error_within_a_stream_is_in_its_line(text: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    with log_lines(caplog) as lines:
        Gateway(text, FakeOwner((5,), GivenUp("no worker is left", 1.0))).chat(stream=True)
        Gateway(text, FakeOwner((5,), (2,))).chat(stream=True)
    assert [(line["status"], line["finish"], line.get("error")) for line in lines] == [
        (200, "error", "no worker is left"),
        (200, "stop", None),
    ]


def test_a_request_leaves_one_line_without_its_words(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with log_lines(caplog) as lines:
        for stream in (False, True):
            gateway.chat(messages=[{"role": "user", "content": "xyzzy"}], stream=stream)
        gateway.get("/health")
    assert [line["request_id"] for line in lines] == [request.id for request in gateway.owner.opened]
    for line, request in zip(lines, gateway.owner.opened, strict=True):
        told = {name: line[name] for name in ("class", "prompt_tokens", "status", "finish")}
        assert told == {"class": "rt", "prompt_tokens": len(request.prompt), "status": 200, "finish": "stop"}
        assert 0 < line["ttft_s"] <= line["duration_s"]
    assert "xyzzy" not in caplog.text + str(lines)
    assert "Hello" not in caplog.text + str(lines)
