"""Tests that a deployment of SmolLM2 answers chats as transformers does, extracts facts by a caller's schema, and calls
tools with what the user said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from tests.conftest import SOAK
from tests.end_to_end.deployment import ANSWER_S, NAME, Deployment, deployed
from tests.rare import thinned
from tests.real_models.conftest import TOKENS, Real
from tests.real_models.prompts import CONVERSATIONS, EXTRACTIONS

RIGHT = 0.85  # of the extractions: no more is asked of a model of this size
RANKS = ("--tensor-parallel-size", "3")
KINDS = [("1+1",), *([("colocated",), ("1+1", *RANKS), ("colocated", *RANKS)] if SOAK else [])]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": says,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            },
        },
    }
    for name, says, properties in (
        ("get_weather", "Return the weather of a city", {"city": {"type": "string"}}),
        ("add", "Add two numbers", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
    )
]
CALLS = [
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
    ("How is the weather in Rome today?", "get_weather", {"city": "Rome"}),
    ("What is 3 plus 4? Use the tool.", "add", {"a": 3, "b": 4}),
    ("Add 20 and 22.", "add", {"a": 20, "b": 22}),
]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def served(request: pytest.FixtureRequest, real: Real) -> Iterator[Deployment]:
    topology, *flags = request.param
    flags += ["--dtype", "float32", "--max-model-len", "2048"]  # so long that its KV fits into the pool of the tests
    with deployed(*flags, topology=topology, model=real.file) as deployment:
        yield deployment


def ask(deployment: Deployment, messages: list[dict[str, str]], **fields: Any) -> Any:
    """Return the choice of a greedy answer; best-effort, so that a slow machine refuses none."""
    body = {"model": NAME, "messages": messages, "temperature": 0, "service_tier": "flex", **fields}
    url = f"{deployment.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=ANSWER_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_chats_are_those_of_transformers(served: Deployment, real: Real) -> None:
    """All are sent at once, twice: their first words are found in the prefix cache, and the second time all are."""
    asked = [*zip(CONVERSATIONS, real.prompts, strict=False)][:: 1 if SOAK else 12] * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        options = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
        choices = [*pool.map(lambda one: ask(served, one[0], **options), asked)]
    for (_, prompt), choice in zip(asked, choices, strict=True):
        assert len(choice["token_ids"]) == TOKENS
        real.check(prompt, choice["token_ids"], "served")
        assert choice["message"]["content"] == real.text.decode(choice["token_ids"])
    assert served.metric("prompt_tokens_cached_total") > 0


def test_an_answer_ends_where_the_model_ends_it(served: Deployment) -> None:
    choice = ask(served, user("What is the capital of France?"), max_tokens=60)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("The capital of France is Paris.", "stop")


def test_extractions_make_sense(served: Deployment) -> None:
    """Each is JSON that follows the caller's schema, and ends; most have the facts of the text.

    The short form has every fourth one: of each kind.
    """

    def extract(one: tuple[str, dict[str, Any], dict[str, Any]]) -> bool:
        text, schema, facts = one
        form = {"type": "json_schema", "json_schema": {"name": "facts", "schema": schema, "strict": True}}
        question = f"Extract the {' and '.join(facts)} from this text as JSON: {text}"
        choice = ask(served, user(question), response_format=form, max_tokens=120)
        said = json.loads(choice["message"]["content"])
        jsonschema.validate(said, schema)
        assert choice["finish_reason"] == "stop"
        return all(str(said[key]).lower() == str(fact).lower() for key, fact in facts.items())

    assert len(EXTRACTIONS) == 20
    asked = EXTRACTIONS[:: 1 if SOAK else 4]
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(extract, asked)) >= int(RIGHT * len(asked))


@pytest.mark.parametrize(("question", "name", "arguments"), thinned(CALLS, usual=1))
def test_a_tool_is_called_with_what_the_user_said(
    question: str, name: str, arguments: dict[str, Any], served: Deployment
) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80}
    choice = ask(served, user(question), **asked)
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)
