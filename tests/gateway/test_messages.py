"""Tests of the Messages API: messages, their events, tools, errors in Anthropic's form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from alignedserve.core import FinishReason, Opening
from alignedserve.gateway.access.keys import key_ring
from alignedserve.owner.client import Culprit, Delivered, Overloaded
from alignedserve.text.encoding import encode
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, FakeOwner, Gateway, ids_of
from tests.gateway.test_tools import PARAMETERS, SAID_BY_HERMES, hermes, prompt_of, saying  # noqa: F401  (a fixture)

HELLO = "Hello, naïve 😀!"
USER = {"role": "user", "content": "Hi"}
WEATHER = {"name": "weather", "description": "Of a city", "input_schema": PARAMETERS}
PATH = "/v1/messages"


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return saying(text, HELLO)


def ask(gateway: Gateway, path: str = PATH, **fields: Any) -> httpx.Response:
    limit = {} if path.endswith("count_tokens") else {"max_tokens": 64}
    return gateway.ask("POST", path, json={"model": MODEL, "messages": [USER], **limit, **fields})


def events_of(answer: httpx.Response) -> list[Any]:
    blocks = [block.split("\n") for block in answer.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [named for named, _ in blocks] == [f"event: {event['type']}" for event in events]
    return events


def assembled(events: list[Any]) -> dict[str, Any]:
    """Return the message that a client puts together from the events."""
    message: dict[str, Any] = events[0]["message"]
    arguments = ""
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            kind = delta["type"].removesuffix("_delta")
            if kind in ("text", "thinking", "signature"):
                block[kind] += delta[kind]
            else:
                arguments += delta["partial_json"]
                block["input"] = arguments
        elif event["type"] == "content_block_stop" and arguments:
            message["content"][event["index"]]["input"] = json.loads(arguments)
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    assert events[-1] == {"type": "message_stop"}
    return message


def test_a_message_is_answered_whole_and_in_events(gateway: Gateway, hello: tuple[int, ...]) -> None:
    whole = ask(gateway, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    body = whole.json()
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
    assert body["content"] == [{"type": "text", "text": HELLO}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == len(hello)
    assert body["id"].startswith("msg_")
    assert whole.headers["request-id"] == whole.headers["x-request-id"]
    assert "Be brief." in prompt_of(gateway)
    events = events_of(ask(gateway, system="Be brief.", stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_delta") > 3
    assert {**assembled(events), "id": None} == {**body, "id": None}


def test_a_tool_is_called_and_its_result_comes_back(hermes: TextModel) -> None:  # noqa: F811
    gateway = saying(hermes, SAID_BY_HERMES)
    body = ask(gateway, tools=[WEATHER]).json()
    text, call = body["content"]
    assert (text["type"], body["stop_reason"]) == ("text", "tool_use")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rom"})
    assert not gateway.owner.opened[-1].sampling.syntax
    ask(gateway, tools=[{**WEATHER, "strict": True}])
    assert gateway.owner.opened[-1].sampling.syntax
    events = events_of(ask(gateway, tools=[WEATHER], stream=True))
    again = assembled(events)["content"][1]
    assert {**again, "id": None} == {**call, "id": None}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "It rains."}]}
    asked = [USER, {"role": "assistant", "content": body["content"]}]
    answered = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
    assert ask(gateway, tools=[WEATHER], messages=[*asked, answered], max_tokens=8).status_code == 200
    shown = prompt_of(gateway)
    assert '{"name": "weather", "arguments": {"city": "Rom"}}' in shown
    assert shown.index("It rains.") < shown.index("So?")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_can_be_demanded(text: TextModel, choice: dict[str, str]) -> None:
    gateway = saying(text, text.call_format.write([("weather", {"city": "Rom"})]))
    body = ask(gateway, tools=[WEATHER], tool_choice=choice).json()
    assert [block["type"] for block in body["content"]] == ["tool_use"]
    assert gateway.owner.opened[-1].sampling.syntax


def test_it_stops_at_a_sequence_or_at_the_limit(gateway: Gateway) -> None:
    stopped = ask(gateway, stop_sequences=["naïve", "xyz"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "naïve")
    assert stopped["content"][0]["text"] == "Hello, "
    assert ask(gateway, max_tokens=2).json()["stop_reason"] == "max_tokens"


def test_a_limit_beyond_the_context_is_the_context(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((5,) * 300), max_model_len=64)
    assert ask(gateway, max_tokens=32_000).json()["stop_reason"] == "model_context_window_exceeded"
    assert ask(gateway, max_tokens=4).json()["stop_reason"] == "max_tokens"


def test_the_answer_continues_what_the_client_has_begun(gateway: Gateway) -> None:
    ask(gateway, messages=[USER, {"role": "assistant", "content": "Well,"}])
    assert prompt_of(gateway).endswith("Well,")


def test_texts_of_one_turn_are_lines_of_it(gateway: Gateway) -> None:
    ask(gateway, messages=[{"role": "user", "content": [{"type": "text", "text": text} for text in ("Hi", "you")]}])
    assert "Hi\nyou" in prompt_of(gateway)


def test_usage_says_what_of_the_prompt_was_known(text: TextModel) -> None:
    pieces = Delivered((300,), None, opening=Opening(num_cached=3)), Delivered((301,), FinishReason.LENGTH)
    gateway = Gateway(text, FakeOwner(*pieces))
    used = ask(gateway).json()["usage"]
    assert used["cache_read_input_tokens"] == 3
    assert used["input_tokens"] + 3 == ask(gateway, f"{PATH}/count_tokens").json()["input_tokens"]


def test_what_changes_nothing_is_named_as_its_client_names_it(gateway: Gateway) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = ask(gateway, max_tokens=1500, thinking=thinking, workspace_id="a")
    assert answer.headers["x-ignored-fields"] == "workspace_id, thinking"


def test_tokens_are_counted_without_an_answer(gateway: Gateway) -> None:
    counted = ask(gateway, f"{PATH}/count_tokens").json()
    assert gateway.owner.opened == []
    used = ask(gateway).json()["usage"]
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


def test_what_a_template_writes_between_short_texts_counts_before_it_is_encoded(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of four megabytes was three million tokens, and a gigabyte of them: none of its texts is long."""
    seen: list[int] = []

    def noted(tokenizer: Tokenizer, asked: str, add_special_tokens: bool) -> list[int]:
        seen.append(len(asked))
        return encode(tokenizer, asked, add_special_tokens)

    monkeypatch.setattr("alignedserve.text.chat_template.encode", noted)
    schema = {"type": "string", "enum": [f"{number:06}" for number in range(20_000)]}
    answer = ask(gateway, f"{PATH}/count_tokens", tools=[{"name": "a", "input_schema": schema}])
    assert answer.status_code == 400
    assert "the prompt is too long" in answer.json()["error"]["message"]
    assert max(seen) < 200_000 / 10


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "other"}, "other"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "type custom"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"odd": 1}, "odd"),
        ({"messages": [{"role": "user", "content": "Hi " * 1000}]}, "too long"),
    ],
)
def test_what_cannot_be_served_is_refused_in_its_form(gateway: Gateway, fields: dict[str, Any], named: str) -> None:
    answer = ask(gateway, **fields)
    kinds = {400: "invalid_request_error", 404: "not_found_error"}
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kinds[answer.status_code]
    assert named in answer.json()["error"]["message"]


def test_the_key_comes_in_its_own_header(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner(ids_of(text, HELLO), text.eos_ids), keys=key_ring("secret", None))
    body = {"model": MODEL, "max_tokens": 8, "messages": [USER]}
    for headers, status in (({}, 401), ({"x-api-key": "other"}, 401), ({"x-api-key": "secret"}, 200)):
        answer = gateway.ask("POST", PATH, json=body, headers=headers)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["type"] == "authentication_error"


def test_errors_before_and_in_a_stream(text: TextModel) -> None:
    full = ask(Gateway(text, FakeOwner(Overloaded("full", 2.0))), stream=True)
    assert (full.status_code, full.headers["retry-after"]) == (429, "2")
    assert full.json()["error"] == {"type": "rate_limit_error", "message": "full"}
    culprit = ask(Gateway(text, FakeOwner(Culprit("3 workers ended"))), stream=True)
    assert (culprit.status_code, culprit.headers["x-should-retry"]) == (500, "false")
    assert culprit.json()["error"] == {"type": "api_error", "message": "3 workers ended"}
    broken = ask(Gateway(text, FakeOwner(ids_of(text, HELLO), RuntimeError("unforeseen"))), stream=True)
    last = events_of(broken)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_a_tool_without_a_schema_takes_nothing(text: TextModel) -> None:
    gateway = saying(text, text.call_format.write([("now", {})]))
    body = ask(gateway, tools=[{"name": "now"}], tool_choice={"type": "any"}).json()
    assert body["content"][0]["input"] == {}


@pytest.mark.parametrize("value", ["[" * 100_000 + "]" * 100_000, r'"\ud800"'], ids=["deep", "half a character"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_arguments_that_no_client_could_read_are_none(hermes: TextModel, value: str, is_streamed: bool) -> None:  # noqa: F811
    gateway = saying(hermes, f'<tool_call>\n{{"name": "weather", "arguments": {{"city": {value}}}}}\n</tool_call>')
    answer = ask(gateway, tools=[WEATHER], stream=is_streamed)
    if is_streamed:
        assert events_of(answer)[-1] == {"type": "message_stop"}
    else:
        assert [block["input"] for block in answer.json()["content"]] == [{}]
