"""Tests of output formats over HTTP: tokens follow the schema, also when another worker continues a request."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import jsonschema
import pytest

from tests.conftest import SOAK
from tests.end_to_end.client import client
from tests.end_to_end.deployment import ANSWER_S, MODEL, NAME, Deployment, deployed
from tests.models import llama
from tests.rare import rare
from tests.schemas import WORDS, schema

NUM_SCHEMAS = 300 if SOAK else 4
AT_ONCE = 12
CHAT = "/v1/chat/completions"
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {**PLACE, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "time"}},
]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Yield a deployment of random weights with the demo model's tokens."""
    folder = llama(tmp_path_factory.mktemp("random"), vocab_size=2048, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    with deployed("--served-model-name", NAME, topology="1+1", model=folder) as deployment:
        yield deployment


def test_what_is_whole_follows_its_schema(deployment: Deployment) -> None:
    check_schemas(deployment, least=NUM_SCHEMAS // 2)


@rare  # tests/engine/test_syntax.py has random logits
def test_so_it_does_with_a_random_model(random_model: Deployment) -> None:
    check_schemas(random_model, least=1)


def check_schemas(deployment: Deployment, least: int) -> None:
    """Check answers against their schemas; at least `least` answers must end before their limit."""
    answers = asyncio.run(_ask_all(deployment))
    ended = [(wanted, choice) for wanted, choice in answers if choice["finish_reason"] == "stop"]
    for wanted, choice in ended:
        jsonschema.validate(json.loads(choice["message"]["content"]), wanted)
    assert {choice["finish_reason"] for _, choice in answers} <= {"stop", "length"}
    assert len(ended) >= least


async def _ask_all(deployment: Deployment) -> list[tuple[Any, Any]]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def ask(http: httpx.AsyncClient, number: int) -> tuple[Any, Any]:
        wanted = schema(Random(number))
        asked = f"Tell me the {Random(number).choice(WORDS)} of number {number} as JSON."
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": wanted, "strict": True}}
        body = {"messages": [{"role": "user", "content": asked}], "response_format": form, "seed": number}
        async with limit:
            answer = await http.post(CHAT, json={**BODY, **body, "temperature": 1.0, "max_tokens": 250})
        assert answer.status_code == 200, answer.text
        return wanted, answer.json()["choices"][0]

    async with client(deployment.url) as http:
        return [*await asyncio.gather(*(ask(http, number) for number in range(NUM_SCHEMAS)))]


# Best-effort, so that a slow machine refuses no request.
BODY: dict[str, Any] = {
    "model": NAME,
    "service_tier": "flex",
    "messages": [{"role": "user", "content": "What is the weather?"}],
}


def ask(deployment: Deployment, **fields: Any) -> Any:
    answer = httpx.post(f"{deployment.url}{CHAT}", json={**BODY, **fields}, timeout=ANSWER_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_demanded_comes(deployment: Deployment, choice: Any) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 120}
    (answered,) = ask(deployment, **asked)["choices"]
    (call,) = answered["message"]["tool_calls"]
    assert answered["finish_reason"] == "tool_calls"
    assert call["function"]["name"] in ("weather", "time")
    if call["function"]["name"] == "weather":
        jsonschema.validate(json.loads(call["function"]["arguments"]), PLACE)


def test_choices_and_prompts_are_one_answer(deployment: Deployment) -> None:
    prompts = ["One", "Two", "Three"]
    asked = {"model": NAME, "prompt": prompts, "n": 2, "max_tokens": 5, "service_tier": "flex"}
    asked |= {"temperature": 1, "seed": 4, "echo": True, "logprobs": 1}
    answer = httpx.post(f"{deployment.url}/v1/completions", json=asked, timeout=ANSWER_S, trust_env=False).json()
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
    for number, choice in enumerate(answer["choices"]):
        assert choice["text"].startswith(prompts[number // 2])
        assert choice["logprobs"]["token_logprobs"][0] is None
    (alone,) = ask_again(deployment, asked, prompts[1], seed=5)
    assert alone["text"] == answer["choices"][3]["text"], "the second choice of the second prompt"


def ask_again(deployment: Deployment, asked: dict[str, Any], prompt: str, seed: int) -> Any:
    body = {**asked, "prompt": prompt, "n": 1, "seed": seed}
    return httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False).json()[
        "choices"
    ]
