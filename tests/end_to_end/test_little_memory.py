"""Tests of a device that holds one request of the longest kind, and of a pool that keeps little: requests wait, leave
and come back, end when memory does, and free it when their clients leave."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import SOAK
from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, mixed, tokens_of
from tests.end_to_end.deployment import BACK_S, NAME, TOPOLOGIES, Deployment, deployed, wait_until
from tests.end_to_end.test_reuse import Turn, check, conversations, talks
from tests.rare import rare, thinned

MOST = 400  # tokens of a request; test_start.py tests the error of a device that holds less
FLAGS = (
    *("--max-model-len", str(MOST), "--kv-memory-mb", "5", "--pool-memory-mb", "16"),
    *("--set", "kvpool.page_size=16", "--pool-verify-pages", "--log-level", "debug"),
)
ROUNDS = 20 if SOAK else 1


@pytest.fixture(scope="module", params=thinned(TOPOLOGIES[::-1], usual=1))  # tests/engine has both, without servers
def tight(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    with deployed(*FLAGS, topology=request.param) as deployment:
        yield deployment


# --- Requests that leave and come back


def test_a_request_that_has_to_leave_and_comes_back_equals_transformers(tight: Deployment) -> None:
    """The first conversations may find room: until some outputs have ended, longer ones are expected."""
    for _ in range(6):
        check(talks(tight, count=5, turns=2, most=MOST))
        if re.search(r" (decode|prefill)-0: goes to pool-0", tight.whole_log()):
            return
    pytest.fail("nobody had to leave")


@rare  # the simulator kills pools amid conversations
def test_turns_over_a_pool_that_dies_equal_transformers(tight: Deployment) -> None:
    async def talk() -> list[list[Turn]]:
        async with conversations(tight.url, 4, 2, MOST) as spoken:
            before = await asyncio.to_thread(tight.metric, "generation_tokens_total")
            while await asyncio.to_thread(tight.metric, "generation_tokens_total") < before + 100:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(tight.wound, "pool-0")
            return await spoken

    check(asyncio.run(talk()))
    wait_until(lambda: tight.is_ready, BACK_S)


# --- Requests that never fit, or outgrow the device


async def ask(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Count from 1 to 900."}]
    return await http.post("/v1/chat/completions", json={"model": NAME, "messages": messages, **fields})


async def too_long(url: str) -> tuple[httpx.Response, httpx.Response, httpx.Response]:
    async with client(url) as http:
        prompt = {"model": NAME, "prompt": [7] * MOST}
        return await asyncio.gather(
            http.post("/v1/completions", json=prompt),
            ask(http, ignore_eos=True, max_tokens=MOST),
            ask(http, ignore_eos=True),  # without a limit, it would never end
        )


@rare  # tests/gateway/test_choices.py has what both are told
def test_a_request_that_never_fits_is_refused_and_a_request_that_outgrows_the_device_ends_there(
    tight: Deployment,
) -> None:
    """Both run beside other requests, whose answers stay what they are alone."""
    wanted = mixed(4, seed=21, prompts=(3, 200), outputs=(1, 60))

    async def together() -> Any:
        return await asyncio.gather(too_long(tight.url), all_tokens(tight.url, wanted))

    (long_prompt, *outgrow), outputs = asyncio.run(together())
    check_greedy(wanted, outputs)
    error = long_prompt.json()["error"]
    assert (long_prompt.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {MOST} tokens" in error["message"]
    assert f"it has {MOST} tokens" in error["message"]
    for outgrows in outgrow:
        assert outgrows.status_code == 200, outgrows.text
        (choice,), usage = outgrows.json()["choices"], outgrows.json()["usage"]
        assert (choice["finish_reason"], usage["total_tokens"]) == ("length", MOST)
        assert f"maximum context length is {MOST} tokens" in choice["finish_message"]


# --- Clients that leave


@rare  # tests/decode_worker has requests that are aborted in each state, and test_api.py a client that leaves
def test_clients_that_leave_free_their_memory(tight: Deployment) -> None:
    """A request of the longest kind has no room while anything of another request remains."""
    for number in range(ROUNDS):
        asyncio.run(_leave(tight, number))
        wait_until(lambda: tight.metric("num_requests_open") == 0, BACK_S, tight.log)
    longest = [
        Wanted(request.prompt, MOST - len(request.prompt), stream=True)
        for request in mixed(2, 3, (MOST // 2, MOST // 2))
    ]
    check_greedy(longest, asyncio.run(asyncio.wait_for(all_tokens(tight.url, longest), BACK_S)))


async def _leave(deployment: Deployment, seed: int) -> None:
    """Send many requests, most of which wait for memory; each client leaves at another moment."""
    draw = random.Random(seed)

    async def leaves(http: httpx.AsyncClient, wanted: Wanted) -> None:
        try:
            await asyncio.wait_for(tokens_of(http, wanted), draw.uniform(0.05, 0.7))
        except asyncio.TimeoutError:
            return

    async with client(deployment.url) as http:
        wanted = mixed(12, seed, prompts=(3, MOST // 2), outputs=(100, MOST // 2))
        await asyncio.gather(*(leaves(http, request) for request in wanted))
