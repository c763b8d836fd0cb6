"""Tests of prompts that share a prefix, and of turns that continue a conversation: reused KV brings the right tokens.

The pool keeps everything here; test_little_memory.py has one that keeps little.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx

from tests.end_to_end.client import Wanted, check_greedy, client, held_out, tokens_of
from tests.end_to_end.deployment import ANSWER_S, Deployment

PAGE = 64  # tokens in a page of a pool
SHARED = held_out()[:200]  # as long as a system prompt
Turn = tuple[Wanted, list[int]]


async def conversation(http: httpx.AsyncClient, number: int, turns: int, most: int = 2_000) -> list[Turn]:
    """Hold a conversation: the prompt of each turn is all that was said before, and something new."""
    draw = random.Random(f"conversation {number}")
    said, done = SHARED, list[Turn]()
    for turn in range(turns):
        start = draw.randrange(len(held_out()) - 60)
        said += held_out()[start : start + draw.randint(1, 60)]
        output = draw.randint(70, 140)
        if len(said) + output > most:
            break
        wanted = Wanted(said, output, stream=turn % 2 == 0, ignore_eos=True, logprobs=number % 3 == 0)
        done.append((wanted, await tokens_of(http, wanted)))
        said += tuple(done[-1][1])
    return done


def check(conversations: Sequence[Sequence[Turn]]) -> None:
    turns = [turn for conversation in conversations for turn in conversation]
    check_greedy([wanted for wanted, _ in turns], [output for _, output in turns])


@asynccontextmanager
async def conversations(url: str, count: int, turns: int, most: int) -> AsyncIterator[asyncio.Future[list[list[Turn]]]]:
    async with client(url) as http:
        yield asyncio.gather(*(conversation(http, number, turns, most) for number in range(count)))


def talks(deployment: Deployment, count: int, turns: int, most: int = 2_000) -> list[list[Turn]]:
    async def talk() -> list[list[Turn]]:
        async with conversations(deployment.url, count, turns, most) as spoken:
            return await spoken

    return asyncio.run(talk())


def test_turns_and_shared_beginnings_equal_transformers(deployment: Deployment) -> None:
    before = deployment.metric("prompt_tokens_cached_total")
    check(spoken := talks(deployment, count=2, turns=2))
    cached = deployment.metric("prompt_tokens_cached_total") - before
    again = sum(len(wanted.prompt) // PAGE * PAGE for conversation in spoken for wanted, _ in conversation[:-1])
    assert cached >= again, "prompts that the next turn's begins with; of answers what was there in time"


def test_an_answer_need_not_be_computed_again(deployment: Deployment) -> None:
    """The prompt of the next turn begins with the answer."""
    first = Wanted(held_out()[1_000:1_100], 160, stream=False, ignore_eos=True)

    async def ask(wanted: Wanted) -> tuple[list[int], int]:
        async with client(deployment.url) as http:
            answer = (await http.post("/v1/completions", json=wanted.body)).json()
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    answer, cached = asyncio.run(ask(first))
    assert cached == 0
    # this prefill comes after the answer's KV on its way to the pool
    asyncio.run(ask(Wanted(held_out()[3_000:3_100], 8, stream=False)))
    second = replace(first, prompt=(*first.prompt, *answer, *held_out()[:10]), max_tokens=20)
    output, cached = asyncio.run(ask(second))
    assert cached == 256, "four pages of 64, two of them of the answer"
    check_greedy([first, second], [answer, output])


def test_requests_with_another_salt_share_nothing(deployment: Deployment) -> None:
    prompt = list(held_out()[2_000:2_200])
    body = {**Wanted(tuple(prompt), 2, stream=False).body}
    cached = []
    for salt in ("one", "one", "other"):
        salted = {**body, "cache_salt": salt}
        answer = httpx.post(f"{deployment.url}/v1/completions", json=salted, timeout=ANSWER_S).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 192, 0]
