"""Tests of requests that a device cannot hold: refused on arrival, or ended when it is full, without effect on other
requests."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.end_to_end.client import all_tokens, check_greedy, client, mixed
from tests.end_to_end.deployment import NAME, deployed

LONGEST = 400  # tokens: all that the device holds (test_start.py tests the error for less)
SMALL = ("--kv-memory-mb", "4", "--max-model-len", str(LONGEST))


async def ask(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Count from 1 to 900."}]
    return await http.post("/v1/chat/completions", json={"model": NAME, "messages": messages, **fields})


async def too_long(url: str) -> tuple[httpx.Response, httpx.Response, httpx.Response]:
    async with client(url) as http:
        prompt = {"model": NAME, "prompt": [7] * LONGEST}
        return await asyncio.gather(
            http.post("/v1/completions", json=prompt),
            ask(http, max_tokens=LONGEST),
            ask(http, ignore_eos=True),  # without a limit, it would never end
        )


def test_a_request_that_never_fits_is_refused_and_a_request_that_outgrows_the_device_ends_there(topology: str) -> None:
    """Both run beside other requests, whose answers stay what they are alone."""
    wanted = mixed(8, seed=21, prompts=(3, 200), outputs=(1, 60))

    async def together(url: str) -> Any:
        return await asyncio.gather(too_long(url), all_tokens(url, wanted))

    environment = {"ALIGNEDSERVE_SCHEDULE_REFUSE_TTFTS": "0"}
    with deployed(*SMALL, topology=topology, environment=environment) as deployment:
        (long_prompt, long_output, outgrows), outputs = asyncio.run(together(deployment.url))
    check_greedy(wanted, outputs)
    for answer, numbers in ((long_prompt, f"it has {LONGEST} tokens"), (long_output, f"asks for {LONGEST} tokens")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert f"maximum context length is {LONGEST} tokens" in error["message"]
        assert numbers in error["message"]
    assert outgrows.status_code == 200, outgrows.text
    (choice,), usage = outgrows.json()["choices"], outgrows.json()["usage"]
    assert (choice["finish_reason"], usage["total_tokens"]) == ("length", LONGEST)
    assert f"maximum context length is {LONGEST} tokens" in choice["finish_message"]
