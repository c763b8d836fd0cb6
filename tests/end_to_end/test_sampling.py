"""Tests over HTTP of sampling: all that clients can ask for."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import torch

from tests.end_to_end.client import EOS, all_tokens, client, held_out, mixed, reference
from tests.end_to_end.deployment import ANSWER_S, NAME, Deployment

LONG = held_out()[100:700]  # needs more than one scored chunk
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Tell me a story."}], "seed": 5}
FREE = {"temperature": 2.0, "top_p": 0.999, "presence_penalty": 0.4, "repetition_penalty": 1.1}


def complete(deployment: Deployment, prompt: Any, **fields: Any) -> Any:
    body = {"model": NAME, "prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
    return choice_of(deployment, "/v1/completions", body)


def choice_of(deployment: Deployment, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{deployment.url}{path}", json=body, timeout=ANSWER_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("num_prompt", [1, 30, 600])
def test_log_probabilities_of_prompt_and_output_equal_transformers(deployment: Deployment, num_prompt: int) -> None:
    prompt = LONG[:num_prompt]
    choice = complete(deployment, prompt, max_tokens=20, echo=True, logprobs=2, ignore_eos=True)
    tokens, table = (*prompt, *choice["token_ids"]), choice["logprobs"]
    with torch.inference_mode():
        expected = reference()(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    assert len(table["token_logprobs"]) == len(tokens) == num_prompt + 20
    assert table["token_logprobs"][0] is None
    own = expected[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    assert table["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-4)
    likeliest = [max(at.values()) for at in table["top_logprobs"][1:]]
    assert likeliest == pytest.approx(expected.amax(-1).tolist(), abs=1e-4)


def test_repetition_is_penalised_as_transformers_does(deployment: Deployment) -> None:
    prompt = LONG[:60]
    choice = complete(deployment, prompt, max_tokens=40, repetition_penalty=1.3)
    ids = torch.tensor([prompt])
    generated = reference().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, repetition_penalty=1.3
    )
    assert choice["token_ids"] == generated[0, len(prompt) :].tolist()


def test_what_is_sampled_depends_on_no_neighbour(deployment: Deployment) -> None:
    """A request runs alone, and then twice among other requests."""
    body = {"model": NAME, "prompt": LONG[:50], "max_tokens": 60, "seed": 3, "return_token_ids": True, **FREE}
    alone = choice_of(deployment, "/v1/completions", body)["token_ids"]

    async def crowded() -> list[list[int]]:
        async with client(deployment.url) as http:
            asked = asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(2)))
            _, answers = await asyncio.gather(all_tokens(deployment.url, mixed(4, seed=2, outputs=(1, 80))), asked)
            return [answer.json()["choices"][0]["token_ids"] for answer in answers]

    assert asyncio.run(crowded()) == [alone, alone]
    assert choice_of(deployment, "/v1/completions", {**body, "seed": 4})["token_ids"] != alone


def test_stops_end_an_output(deployment: Deployment) -> None:
    free = complete(deployment, LONG[:40], max_tokens=30, ignore_eos=True)
    token = free["token_ids"][7]
    by_token = complete(deployment, LONG[:40], max_tokens=30, ignore_eos=True, stop_token_ids=[token])
    assert by_token["token_ids"] == free["token_ids"][: free["token_ids"].index(token) + 1]
    assert by_token["finish_reason"] == "stop"
    stop = free["text"][10:13]
    by_text = complete(deployment, LONG[:40], max_tokens=30, ignore_eos=True, stop=[stop])
    assert (by_text["text"], by_text["finish_reason"]) == (free["text"][: free["text"].index(stop)], "stop")


def test_an_end_waits_for_min_tokens(deployment: Deployment) -> None:
    greedy = {**CHAT, "temperature": 0, "return_token_ids": True}
    usual = choice_of(deployment, "/v1/chat/completions", greedy)["token_ids"]
    count = len(usual) + 5
    limits = {"min_tokens": count, "max_tokens": count + 5}
    longer = choice_of(deployment, "/v1/chat/completions", {**greedy, **limits})["token_ids"]
    assert usual[-1] == EOS
    assert longer[: len(usual) - 1] == usual[:-1]
    assert EOS not in longer[:count]
    both = complete(deployment, LONG[:40], max_tokens=9, min_tokens=9, ignore_eos=True)
    assert (len(both["token_ids"]), both["finish_reason"]) == (9, "length")


def test_only_what_is_allowed_comes(deployment: Deployment) -> None:
    few = [300, 301, 302, EOS]
    choice = complete(deployment, LONG[:40], max_tokens=12, allowed_token_ids=few, temperature=2.0)
    assert set(choice["token_ids"]) <= set(few)
    biased = complete(deployment, LONG[:40], max_tokens=5, logit_bias={"300": 100})
    assert biased["token_ids"] == [300] * 5


@pytest.mark.parametrize("seed", range(2))
def test_an_answer_is_one_of_the_choices(deployment: Deployment, seed: int) -> None:
    choices = ["yes", "yes, please", "no"]
    body = {**CHAT, "temperature": 2.0, "seed": seed, "structured_outputs": {"choice": choices}}
    answer = choice_of(deployment, "/v1/chat/completions", body)
    assert answer["message"]["content"] in choices
    assert answer["finish_reason"] == "stop"
