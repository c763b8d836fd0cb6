"""Tests that lists of tokens, which each choice of a body has, cost no part many times the body that brought them."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Request, Sampling
from alignedserve.gateway.openai.requests import FEW_CHOICES, MOST_CHOICE_TOKENS, MOST_RULE_BYTES
from alignedserve.gateway.openai.types import MOST_STOP_TOKENS
from alignedserve.protocol.messages import Submit
from alignedserve.protocol.wire import MOST_FRAME_BYTES, Envelope, decode, encode
from alignedserve.shell.links import SharedPrompts
from alignedserve.text.text_model import TextModel
from alignedserve.text.token_sets import pack_tokens, unpack_tokens
from tests.gateway.conftest import MODEL, FakeOwner, Gateway
from tests.rare import rare, rarely

VOCABULARY = 151_936
ALL = [*range(VOCABULARY)]
HALF = sorted(random.Random(0).sample(ALL, VOCABULARY // 2))  # packs worst
MOST_TIMES = 50  # the body that a part may hold


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(replace(text, vocab_size=VOCABULARY), FakeOwner((2,)))


def held_bytes(requests: Iterable[Request]) -> int:
    """Return the memory that a part needs for requests which come in a frame each."""
    frames = [encode(Envelope("gateway-0", 1, number, Submit(request))) for number, request in enumerate(requests, 1)]
    tracemalloc.start()
    prompts = SharedPrompts()
    held = [prompts.share(decode(frame, MOST_FRAME_BYTES)) for frame in frames]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(held) == len(frames)
    return size


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"allowed_token_ids": HALF}, id="half"),
        pytest.param({"allowed_token_ids": ALL}, id="all", marks=rare),
        pytest.param(
            {"allowed_token_ids": ALL[::-1], "stop_token_ids": ALL[-MOST_STOP_TOKENS:]}, id="with stops", marks=rare
        ),
    ],
)
def test_no_part_holds_many_times_the_body(gateway: Gateway, fields: dict[str, Any]) -> None:
    """A body of 1 MB with 200 prompts once took 1 GB in the router, and as much in the worker."""
    body = json.dumps({"model": MODEL, "prompt": [[5]] * 200, **fields}).encode()
    tracemalloc.start()
    assert gateway.ask("POST", "/v1/completions", content=body).status_code == 200
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < MOST_TIMES * len(body)
    assert held_bytes(gateway.owner.opened) < MOST_TIMES * len(body)
    assert len({id(request.sampling.allowed_tokens) for request in gateway.owner.opened}) == 1


@pytest.mark.parametrize(
    ("num_prompts", "fields"),
    [
        (1024, {"allowed_token_ids": HALF}),
        (8, {"n": 128, "logit_bias": {str(token): 1 for token in range(1024)}}),
        (1024, {"stop_token_ids": ALL[:MOST_STOP_TOKENS]}),
        (8, {"n": 128, "guided_regex": "a" * 5_000}),
        (8, {"n": 128, "guided_choice": ["a" * 100, "b" * 1000]}),
    ],
    ids=["allowed", "biases", "stops", "syntax", "choice"],
)
def test_no_small_body_is_large_in_every_part(gateway: Gateway, num_prompts: int, fields: dict[str, Any]) -> None:
    fields = {"prompt": [[5]] * num_prompts, **fields}
    refused = gateway.complete(**fields)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_large")
    assert f"and {MOST_RULE_BYTES} is the most" in refused.json()["error"]["message"]
    assert gateway.owner.opened == []
    assert gateway.complete(**{**fields, "prompt": [[5]], "n": 2}).status_code == 200


@pytest.mark.parametrize(
    ("n", "fields"),
    [
        (15, {"logit_bias": {str(token): 1 for token in ALL[-1024:]}}),
        (128, {"stop_token_ids": ALL[-MOST_STOP_TOKENS:]}),
        (12, {"guided_choice": ["ab" * 4000]}),
        (128, {"guided_regex": "a" * 1_500}),
        (60, {"allowed_token_ids": HALF}),
    ],
    ids=["biases", "stops", "choice", "syntax", "allowed"],
)
def test_choices_share_the_rules_of_their_body(gateway: Gateway, n: int, fields: dict[str, Any]) -> None:
    """A body of 2 kB with 256 stop tokens and 128 choices took 1.2 MB in each part, 580 times its own size."""
    body = {"model": MODEL, "prompt": [[5], [6]], "n": n, "max_tokens": 1, **fields}
    assert gateway.ask("POST", "/v1/completions", json=body).status_code == 200
    assert len(gateway.owner.opened) == 2 * n
    plain = [replace(it, sampling=Sampling(seed=it.sampling.seed), stop_tokens=()) for it in gateway.owner.opened]
    assert held_bytes(gateway.owner.opened) - held_bytes(plain) < MOST_TIMES * len(json.dumps(body))


def test_no_prompt_is_large_for_each_of_many_choices(text: TextModel) -> None:
    """A body of 64 kB with 8,000 tokens and 128 choices once took 37 MB in each part, 578 times its own size."""
    gateway = Gateway(replace(text, vocab_size=VOCABULARY), FakeOwner((2,)), max_model_len=131_072, at_once=128)
    refused = gateway.complete(prompt=[*range(100_000, 108_000)], n=128, max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert f"{MOST_CHOICE_TOKENS} is the most" in refused.json()["error"]["message"]
    assert gateway.complete(prompt=[[300] * 2_100] * 8, n=16, max_tokens=1).status_code == 400, "all prompts count"
    assert gateway.owner.opened == []
    body = {"model": MODEL, "prompt": [300] * (MOST_CHOICE_TOKENS // 128), "n": 128, "max_tokens": 1}
    gateway.owner.opened.clear()
    assert gateway.ask("POST", "/v1/completions", json=body).status_code == 200
    assert held_bytes(gateway.owner.opened) < MOST_TIMES * len(json.dumps(body))


@pytest.mark.parametrize("tokens", [[150_000], rarely([300])])
def test_few_choices_may_have_a_prompt_of_the_whole_context(text: TextModel, tokens: list[int]) -> None:
    gateway = Gateway(replace(text, vocab_size=VOCABULARY), FakeOwner((2,)), max_model_len=131_072)
    body = json.dumps({"model": MODEL, "prompt": tokens * 131_000, "n": FEW_CHOICES, "max_tokens": 1}).encode()
    assert gateway.ask("POST", "/v1/completions", content=body).status_code == 200
    assert len(gateway.owner.opened) == FEW_CHOICES
    assert held_bytes(gateway.owner.opened) < MOST_TIMES * len(body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": ALL[: MOST_STOP_TOKENS + 1]}, "stop_token_ids"),
        ({"allowed_token_ids": [*ALL, VOCABULARY]}, "allowed_token_ids"),
        ({"guided_choice": ["a" * 60_000, "b" * 60_000]}, "guided_choice"),
    ],
)
def test_what_is_too_long_or_no_token_is_named(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    refused = gateway.complete(**fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@given(tokens=st.lists(st.integers(0, 99), min_size=1, max_size=40), beyond=st.integers(0, 20))
def test_packed_tokens_are_the_same_set(tokens: list[int], beyond: int) -> None:
    bits = unpack_tokens(pack_tokens(tokens), vocab_size := max(tokens) + 1 + beyond)
    assert len(bits) == vocab_size
    assert {*bits.nonzero()[0].tolist()} == {*tokens}


def test_few_tokens_and_nearly_all_take_few_bytes() -> None:
    assert len(pack_tokens([VOCABULARY - 1])) < 200
    assert len(pack_tokens(ALL)) < 200
    assert len(pack_tokens(HALF)) < 20_000


def test_a_set_is_cut_to_the_vocabulary() -> None:
    assert unpack_tokens(pack_tokens([3, 5000]), 10).nonzero()[0].tolist() == [3]
