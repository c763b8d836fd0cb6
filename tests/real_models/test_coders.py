"""Tests with Qwen2.5-Coder-Instruct of 0.5 and 1.5 billion parameters, in the GGUF files that were published: what a
person asks of them, by their own chat template, and how near their next tokens are to those of transformers.

They are rare: each starts a deployment or reads a model. Which files these are: `python -m tests.real_models.others`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
from collections.abc import Iterator
from functools import cache
from typing import Any

import gguf
import httpx
import jsonschema
import pytest
import torch

from alignedserve.architectures.model_source import resolve
from alignedserve.lab.benchmarks.accuracy import MOST_MEAN, QUESTION, TEXT, logits_of, published
from alignedserve.lab.benchmarks.common.one_pass import OnePass, divergence
from alignedserve.machine.resources import memory
from alignedserve.text.call_grammar import call_syntax
from alignedserve.text.syntax import Syntaxes
from alignedserve.text.text_model import TextModel
from tests.conftest import SOAK
from tests.end_to_end.deployment import ANSWER_S, NAME, Deployment, deployed
from tests.kernels.every import kernels_of, sets_for_whole_models
from tests.real_models.others import CODER, CODER_SMALL, FILES
from tests.real_models.test_served import TOOLS, ask, user

pytestmark = pytest.mark.rare

BOTH = pytest.mark.parametrize("served", [CODER_SMALL.name, CODER.name], indirect=True)
SMALL = pytest.mark.parametrize("served", [CODER_SMALL.name], indirect=True)
# The widest context of the pool that tests have, and the type that a user gets.
FLAGS = ("--dtype", "auto", "--max-model-len", "2048")
ASKED = [  # questions, and what their answers must have
    ("What is the capital of France? Answer in one word.", r"Paris"),
    ("What is 12 times 12? Answer with the number only.", r"144"),
    ("Wie heißt die Hauptstadt von Deutschland? Antworte mit einem Wort.", r"Berlin"),
    ("Write an SQL query that counts the rows of the table users. Query only.", r"(?i)select count\(\*\) from users"),
]
CODE = [  # the same, of code in Python: the function that it must define
    ("Write a Python function is_even(n) that returns True for even numbers. Code only.", "is_even"),
    ("Fix this Python code, code only: def add(a, b) return a + b", "add"),
]
CALLS = [
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
    ("Add 20 and 22.", "add", {"a": 20, "b": 22}),
]
TURNS, LEAST_CACHED = 20, 0.8  # of a conversation; the share of its last prompt that the cache must have
LONG_TOKENS, KILLED_AT = 96, 24  # of a streamed answer
EXPANDED_GB = {CODER_SMALL.name: 4, CODER.name: 10}  # that transformers needs for a moment, in fp32
TOKENS = 120  # whose logits are compared


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    with deployed(*FLAGS, model=FILES[request.param].found()) as deployment:
        yield deployment


def said(served: Deployment, question: str, most: int = 120) -> str:
    choice = ask(served, user(question), max_tokens=most)
    text: str = choice["message"]["content"]
    return text


def called(choice: Any) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@BOTH
def test_answers_make_sense(served: Deployment) -> None:
    for question, wanted in ASKED:
        assert re.search(wanted, answer := said(served, question)), (question, answer)
    for question, function in CODE:
        answer = said(served, question)
        block = re.search(r"```python\n(.*?)```", answer, re.DOTALL)
        parsed = ast.parse(block[1] if block else answer)
        assert [part.name for part in parsed.body if isinstance(part, ast.FunctionDef)][:1] == [function], answer


@BOTH
def test_tools_are_called_by_choice_and_by_force(served: Deployment) -> None:
    """By choice these models write no marker: bare JSON the smaller, a block of code the larger."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for question, name, arguments in CALLS:
        for choice in ("auto", "required"):
            answer = ask(served, user(question), tools=TOOLS, tool_choice=choice, max_tokens=80)
            assert (called(answer), answer["finish_reason"]) == ([(name, arguments)], "tool_calls"), (choice, answer)
    (call,) = called(ask(served, user(CALLS[0][0]), tools=TOOLS, tool_choice=named, max_tokens=80))
    assert call == ("get_weather", {"city": "Paris"})


@SMALL
def test_demanded_calls_end(served: Deployment) -> None:
    several = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True, "max_tokens": 1000}
    answer = ask(served, user(CALLS[1][0]), **several)
    calls = [json.dumps(call) for call in called(answer)]
    assert answer["finish_reason"] == "tool_calls"
    assert 1 <= len(calls) == len({*calls}) <= 16


@BOTH
def test_an_answer_follows_a_schema(served: Deployment) -> None:
    facts = {"name": "Ada Lovelace", "age": 36, "city": "London"}
    kinds = {name: {"type": "integer" if isinstance(fact, int) else "string"} for name, fact in facts.items()}
    schema = {"type": "object", "properties": kinds, "required": [*facts]}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    question = "Extract the name, age and city as JSON: Ada Lovelace is 36 years old and lives in London."
    choice = ask(served, user(question), response_format=form, max_tokens=80)
    found = json.loads(choice["message"]["content"])
    jsonschema.validate(found, schema)
    assert (found, choice["finish_reason"]) == (facts, "stop")


@BOTH
def test_a_gap_in_code_is_filled(served: Deployment) -> None:
    before = "def largest(numbers):\n    best = numbers[0]\n    for number in numbers:\n        "
    prompt = f"<|fim_prefix|>{before}<|fim_suffix|>\n    return best\n<|fim_middle|>"
    body = {"model": NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0, "service_tier": "flex"}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False).json()
    assert answer["choices"][0]["text"].startswith("if number > best:\n            best = number"), answer


@SMALL
def test_a_conversation_finds_its_turns_in_the_cache(served: Deployment) -> None:
    messages, usage = list[dict[str, str]](), dict[str, Any]()
    for turn in range(TURNS):
        messages += user(f"Repeat this and say nothing else: item {turn}")
        body = {"model": NAME, "messages": messages, "temperature": 0, "service_tier": "flex", "max_tokens": 8}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=ANSWER_S, trust_env=False).json()
        usage, text = answer["usage"], answer["choices"][0]["message"]["content"]
        assert f"item {turn}" in text, text
        messages.append({"role": "assistant", "content": text})
    assert usage["prompt_tokens_details"]["cached_tokens"] >= LEAST_CACHED * usage["prompt_tokens"], usage


@SMALL
def test_a_killed_worker_loses_no_token(served: Deployment) -> None:
    """The model is sure of each of these tokens: rounding changes none, which differs in a prompt that is run again."""
    body = {"model": NAME, "messages": user("Count from 1 to 40, separated by commas."), "max_tokens": LONG_TOKENS}
    body |= {"temperature": 0, "stream": True, "return_token_ids": True, "ignore_eos": True, "service_tier": "flex"}

    def tokens(kills: bool) -> list[int]:
        found = list[int]()
        with httpx.stream(
            "POST", f"{served.url}/v1/chat/completions", json=body, timeout=ANSWER_S, trust_env=False
        ) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"] or [{}]
                found += choice.get("token_ids") or []
                if kills and len(found) >= KILLED_AT:
                    os.kill(served.pid("decode-0"), signal.SIGKILL)
                    kills = False
        assert not kills, "the answer was over before the kill"
        return found

    whole = tokens(kills=False)
    assert len(whole) == LONG_TOKENS
    assert tokens(kills=True) == whole


# --- Without a deployment


def test_a_real_tokenizer_can_follow_a_demanded_call(tmp_path: Any) -> None:
    """Its markers are tokens that are not special, but that a grammar cannot spell."""
    folder = resolve(str(CODER_SMALL.found()), str(tmp_path))
    text = TextModel.load(folder)
    form, functions = text.call_format, {"get_weather": TOOLS[0]["function"]["parameters"]}
    assert not {*text.grammar_tokens(form.markers).values()} & text.special_ids
    syntaxes = Syntaxes(folder)
    syntax = call_syntax(form, functions, False, text.grammar_tokens(form.markers))
    assert syntaxes.find_fault(syntax) is None
    matcher, ids = syntaxes.matcher(syntax), text.answer_ids(form.write([("get_weather", {"city": "Paris"})]))
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


SLOW = pytest.mark.skipif(not SOAK, reason="transformers takes a minute to read the file: the smaller one is read")


@pytest.mark.parametrize("name", [CODER_SMALL.name, pytest.param(CODER.name, marks=SLOW)])
def test_next_tokens_stay_near_those_of_transformers(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, with the file's own weights, against the same expanded in fp32."""
    file = FILES[name].found()
    if (free := memory()) is not None and free.available < EXPANDED_GB[name] << 30:
        pytest.skip(f"expanded in fp32 the model needs {EXPANDED_GB[name]} GB of free memory")
    for slow in ("GGUFReader", "get_tensor_name_map"):  # transformers asks for each thrice
        monkeypatch.setattr(gguf, slow, cache(getattr(gguf, slow)))
    folder = resolve(str(file), str(tmp_path))
    text = TextModel.load(folder)
    written = text.prompt_ids(TEXT.read_text(encoding="utf-8"), with_special=False)
    tokens = (*text.chat_ids(user(QUESTION)), *written)[:TOKENS]
    logits = OnePass(folder, torch.bfloat16, kernels_of(sets_for_whole_models()[-1]))(tokens)
    found = divergence(logits_of(published(file), tokens), logits)
    print(found)
    assert found.mean <= MOST_MEAN, found
