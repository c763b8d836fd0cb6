"""Tests that clients get answers of OpenAI's shape: by the types of its SDK, and by its published schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import FakeOwner, Gateway, data_lines, ids_of
from tests.gateway.published import ANSWERS, validator
from tests.gateway.test_tools import SAID_BY_LLAMA3, TOOLS

FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 3, "user": "u", "metadata": {"a": "b"}, "service_tier": "flex"},
    {"max_tokens": 2, "return_token_ids": True},
]
OF_CHATS: list[dict[str, Any]] = [
    *FIELDS,
    {"logprobs": True, "top_logprobs": 2},
    {**TOOLS, "tool_choice": "required"},
    {**TOOLS, "tool_choice": "required", "n": 2, "logprobs": True},
]
# An echo with log-probabilities is left out: the first token of a prompt has none, and its null, which OpenAI and other
# servers send too, is unknown to both the types and the schema.
OF_COMPLETIONS: list[dict[str, Any]] = [*FIELDS, {"echo": True}, {"logprobs": 2}, {"prompt": ["a", "b"], "logprobs": 0}]
USAGE: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
Fits = Callable[[Any, type[BaseModel] | None, str], None]


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(text, FakeOwner(*((token,) for token in (*ids_of(text, SAID_BY_LLAMA3), text.eos_ids[0]))))


def by_sdk(body: Any, kind: type[BaseModel] | None, _: str) -> None:
    if kind is not None:
        kind.model_validate(body)


def by_publication(body: Any, _: type[BaseModel] | None, name: str) -> None:
    validator(name).validate(body)


@pytest.fixture(params=[by_sdk, by_publication])
def fits(request: pytest.FixtureRequest) -> Fits:
    chosen: Fits = request.param
    return chosen


@pytest.mark.parametrize("fields", OF_CHATS)
def test_chats(gateway: Gateway, fits: Fits, fields: dict[str, Any]) -> None:
    fits(gateway.chat(**fields).raise_for_status().json(), ChatCompletion, "CreateChatCompletionResponse")


@pytest.mark.parametrize("fields", OF_COMPLETIONS)
def test_completions(gateway: Gateway, fits: Fits, fields: dict[str, Any]) -> None:
    fits(gateway.complete(**fields).raise_for_status().json(), Completion, "CreateCompletionResponse")


@pytest.mark.parametrize("usage", USAGE)
@pytest.mark.parametrize("fields", OF_CHATS)
def test_chunks_of_chats(gateway: Gateway, fits: Fits, fields: dict[str, Any], usage: dict[str, Any]) -> None:
    for chunk in chunks(gateway.chat(**fields, **usage, stream=True)):
        fits(chunk, ChatCompletionChunk, "CreateChatCompletionStreamResponse")


@pytest.mark.parametrize("fields", OF_COMPLETIONS)
def test_chunks_of_completions(gateway: Gateway, fits: Fits, fields: dict[str, Any]) -> None:
    for chunk in chunks(gateway.complete(**fields, stream=True)):
        for choice in chunk["choices"]:  # both require a finish reason, which chunks before the last lack
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        fits(chunk, Completion, "CreateCompletionResponse")


def chunks(streamed: Any) -> Iterator[Any]:
    *events, done = data_lines(streamed)
    assert done == "[DONE]"
    yield from events


def test_models_and_errors(gateway: Gateway, fits: Fits) -> None:
    models = gateway.get("/v1/models").json()
    fits(models["data"][0], Model, "Model")
    fits(models, None, "ListModelsResponse")
    fits(gateway.chat(model="other").json(), None, "ErrorResponse")
    fits(gateway.chat(odd=1).json(), None, "ErrorResponse")


@pytest.mark.parametrize("name", ANSWERS)
def test_the_published_schema_refuses_what_is_none(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator(name).validate({"object": "odd"})
