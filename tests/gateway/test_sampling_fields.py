"""Tests of the sampling fields of a request and of what they bring: limits, stops, log-probabilities, echoes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve.core import Choice, Sampling
from alignedserve.text.text_model import TextModel
from alignedserve.text.token_sets import pack_tokens
from tests.gateway.conftest import FakeOwner, Gateway, data_lines, ids_of

HELLO = "Hello, naïve 😀!"
ROUTES = ["chat", "complete"]
FIELDS: dict[str, Any] = {
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "min_tokens": 3,
    "logit_bias": {"7": 5, "300": -100.0},
    "allowed_token_ids": [9, 8, 9, 2],
}


@pytest.fixture
def gateway(text: TextModel, hello: tuple[int, ...]) -> Gateway:
    return Gateway(text, FakeOwner(*((token,) for token in hello)))


@pytest.mark.parametrize("route", ROUTES)
def test_the_engine_is_told(gateway: Gateway, route: str) -> None:
    assert getattr(gateway, route)(**FIELDS, temperature=0.5, seed=1).status_code == 200
    assert gateway.owner.opened[0].sampling == Sampling(
        temperature=0.5,
        seed=1,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        min_tokens=3,
        logit_bias=((7, 5.0), (300, -100.0)),
        allowed_tokens=pack_tokens((9, 8, 2)),
    )


@pytest.mark.parametrize("route", ROUTES)
def test_null_is_as_if_it_were_not_there(gateway: Gateway, route: str) -> None:
    nothing = dict.fromkeys([*FIELDS, "stop", "logprobs", "guided_choice", "structured_outputs"])
    getattr(gateway, route)(**nothing, seed=1)
    assert gateway.owner.opened[0].sampling == Sampling(seed=1)


@pytest.mark.parametrize(
    "fields", [{"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}]
)
def test_a_choice_is_written_in_tokens(gateway: Gateway, text: TextModel, fields: dict[str, Any]) -> None:
    gateway.chat(**fields)
    assert gateway.owner.opened[0].sampling.grammar == Choice((ids_of(text, "yes"), ids_of(text, "no")))
    assert gateway.owner.opened[0].stop_tokens == text.eos_ids


# --- Stops


def texts(streamed: Any, route: str) -> str:
    choices = [chunk["choices"][0] for chunk in data_lines(streamed)[:-1]]
    parts: list[str] = [choice["delta"].get("content", "") if route == "chat" else choice["text"] for choice in choices]
    return "".join(parts)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({"stop": ","}, "Hello"),
        ({"stop": ["llo, n", "xyz"]}, "He"),
        ({"stop": ["ïve 😀"], "include_stop_str_in_output": True}, "Hello, naïve 😀"),
        ({"stop": ["lo", " naïve"], "min_tokens": 2}, "Hello,"),
        ({"stop": "Hello!"}, HELLO),
    ],
)
def test_a_stop_string_ends_the_answer(gateway: Gateway, route: str, fields: dict[str, Any], written: str) -> None:
    answer = getattr(gateway, route)(**fields).json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"] if route == "chat" else choice["text"]) == written
    assert choice["finish_reason"] == "stop"
    assert texts(getattr(gateway, route)(**fields, stream=True), route) == written
    stopped = written != HELLO
    assert len(gateway.owner.cancelled) == 2 * stopped, "what nobody wants is not computed"
    assert gateway.owner.open_now == set()


def test_it_is_the_same_where_tokens_come_together(text: TextModel, hello: tuple[int, ...]) -> None:
    asked = {"stop": ", n", "return_token_ids": True, "logprobs": True}
    together = Gateway(text, FakeOwner(hello)).chat(**asked).json()
    one_by_one = Gateway(text, FakeOwner(*((token,) for token in hello))).chat(**asked).json()
    assert together["choices"] == one_by_one["choices"]
    assert together["usage"] == one_by_one["usage"]
    assert together["usage"]["completion_tokens"] < len(hello)


def test_a_stop_token_is_no_text_unless_it_is_to_be(gateway: Gateway, hello: tuple[int, ...]) -> None:
    without, included = (
        gateway.complete(stop_token_ids=[hello[1]], include_stop_str_in_output=include).json()
        for include in (False, True)
    )
    assert (without["choices"][0]["text"], included["choices"][0]["text"]) == ("Hello", "Hello,")
    assert without["usage"] == included["usage"]


# --- Log-probabilities


def test_tokens_may_be_named_by_their_ids(gateway: Gateway, hello: tuple[int, ...]) -> None:
    """Several tokens may have the same text."""
    asked = {"return_tokens_as_token_ids": True}
    content = gateway.chat(**asked, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in hello]
    assert [entry["token"] for entry in content[0]["top_logprobs"]] == ["token_id:300", "token_id:301"]
    table = gateway.complete(**asked, logprobs=2).json()["choices"][0]["logprobs"]
    assert table["tokens"] == [f"token_id:{token}" for token in hello]
    assert table["top_logprobs"][0].keys() == {"token_id:300", "token_id:301", f"token_id:{hello[0]}"}


def test_a_chat_has_them_as_openai_has(gateway: Gateway, text: TextModel, hello: tuple[int, ...]) -> None:
    content = gateway.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert gateway.owner.opened[0].sampling.logprobs == 2
    assert [entry["logprob"] for entry in content] == [-1.0 - at for at in range(len(hello))]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == HELLO + "<|end|>"
    likeliest = [
        {"token": text.decode([token]), "logprob": value, "bytes": list(text.decode([token]).encode())}
        for token, value in ((300, -0.5), (301, -1.5))
    ]
    assert all(entry["top_logprobs"] == likeliest for entry in content)
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}


def test_a_chat_without_the_likeliest_has_none_of_them(gateway: Gateway) -> None:
    content = gateway.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)
    assert gateway.chat().json()["choices"][0]["logprobs"] is None


def test_they_are_streamed_with_their_tokens(gateway: Gateway) -> None:
    asked = {"logprobs": True, "top_logprobs": 1}
    whole = gateway.chat(**asked).json()["choices"][0]["logprobs"]["content"]
    choices = [chunk["choices"][0] for chunk in data_lines(gateway.chat(**asked, stream=True))[:-1]]
    assert choices[0]["logprobs"] is None, "of no token"
    assert [entry for choice in choices[1:] for entry in choice["logprobs"]["content"]] == whole
    assert "".join(choice["delta"].get("content", "") for choice in choices) == HELLO


def test_a_completion_has_the_older_table(gateway: Gateway, hello: tuple[int, ...]) -> None:
    choice = gateway.complete(logprobs=1).json()["choices"][0]
    table = choice["logprobs"]
    assert table["token_logprobs"] == [-1.0 - at for at in range(len(hello))]
    assert [len(likeliest) for likeliest in table["top_logprobs"]] == [2] * len(hello), "its own beside the likeliest"
    for token, offset in zip(table["tokens"], table["text_offset"], strict=True):
        if "\ufffd" not in token and token != "<|end|>":
            assert choice["text"][offset:].startswith(token)
    assert table["text_offset"][-1] == len(choice["text"])


def test_a_streamed_table_goes_on_where_it_was(gateway: Gateway) -> None:
    for fields in ({"logprobs": 2}, {"logprobs": 0, "echo": True}):
        whole = gateway.complete(**fields).json()["choices"][0]["logprobs"]
        tables = [chunk["choices"][0]["logprobs"] for chunk in data_lines(gateway.complete(**fields, stream=True))[:-1]]
        assert {name: [value for table in tables for value in table[name]] for name in whole} == whole


def test_what_is_next_to_impossible_is_json(text: TextModel) -> None:
    from alignedserve.core import FinishReason, Logprob
    from alignedserve.owner.client import Delivered

    never = Logprob(float("-inf"), ((5, float("-inf")),))
    gateway = Gateway(text, FakeOwner(Delivered((5,), FinishReason.LENGTH, (never,))))
    (entry,) = json.loads(gateway.chat(logprobs=True).content)["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


# --- Echo


@pytest.mark.parametrize("prompt", ["Hi 😀 you", [5, 300, 6]])
def test_a_prompt_is_echoed_with_its_log_probabilities(gateway: Gateway, text: TextModel, prompt: Any) -> None:
    choice = gateway.complete(prompt=prompt, echo=True, logprobs=1).json()["choices"][0]
    request = gateway.owner.opened[0]
    echoed = text.decode(request.prompt)
    assert choice["text"] == echoed + HELLO
    assert request.sampling.prompt_logprobs == 1
    table, count = choice["logprobs"], len(request.prompt)
    assert table["token_logprobs"][:count] == [None, *(-1.0 - at for at in range(1, count))]
    assert table["top_logprobs"][0] is None
    assert table["token_logprobs"][count] == -1.0
    assert table["text_offset"][count] == len(echoed)


def test_an_echo_alone_asks_for_no_log_probabilities(gateway: Gateway) -> None:
    choice = gateway.complete(echo=True).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("Hi" + HELLO, None)
    assert gateway.owner.opened[0].sampling == Sampling(seed=gateway.owner.opened[0].sampling.seed)
    assert texts(gateway.complete(echo=True, stream=True), "complete") == "Hi" + HELLO


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_scored_without_an_answer(gateway: Gateway, stream: bool) -> None:
    answer = gateway.complete(prompt=[5, 300, 6], echo=True, logprobs=0, max_tokens=0, stream=stream)
    body = data_lines(answer)[0] if stream else answer.json()
    choice = body["choices"][0]
    assert gateway.owner.opened[0].max_tokens == 1
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -3.0]
    assert choice["finish_reason"] == "length"
    assert stream or body["usage"]["completion_tokens"] == 0
