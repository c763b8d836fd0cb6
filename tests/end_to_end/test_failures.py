"""Tests that every killed part comes back, and that every accepted request ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest

from tests.conftest import SOAK
from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, mixed, streamed, tokens_of
from tests.end_to_end.deployment import (
    BACK_S,
    MODEL,
    NONE_ON_RAY,
    ONE_ON_RAY,
    Deployment,
    Kind,
    deployed,
    held,
    wait_until,
)

REQUESTS = 20
SEEDS = range(10 if SOAK else 1)
PARTS = {"colocated": ["decode-0", "router"], "1+1": ["prefill-0", "decode-0", "router", "pool-0"]}
FEW = ["decode-0", "router"]  # parts killed on Ray, in the short form


def parts(kind: Kind) -> list[str]:
    topology, launcher = kind
    return FEW if launcher == "ray" and not SOAK else PARTS[topology]


def each_part() -> pytest.MarkDecorator:
    """Parametrize (wounded, part). A kind has one deployment for all tests, since a killed part leaves the other parts
    unchanged."""
    cases = [(kind, part) for kind in ONE_ON_RAY for part in parts(kind)]
    return pytest.mark.parametrize(
        ("wounded", "part"),
        cases,
        indirect=["wounded"],
        ids=[f"{'-'.join(kind)}-{part}" for kind, part in cases],
        scope="module",
    )


@pytest.mark.parametrize("seed", SEEDS)
@each_part()
def test_a_killed_part_comes_back_and_no_token_is_lost(wounded: Deployment, part: str, seed: int) -> None:
    wanted = mixed(REQUESTS, seed=seed, outputs=(60, 200))

    async def serve_and_kill() -> list[list[int]]:
        before = wounded.metric("generation_tokens_total")
        async with client(wounded.url) as http:
            answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
            while await asyncio.to_thread(wounded.metric, "generation_tokens_total") < before + 5 * REQUESTS:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(wounded.wound, part)
            return await asyncio.wait_for(asyncio.gather(*answers), BACK_S)

    try:
        check_greedy(wanted, asyncio.run(serve_and_kill()))
        wait_until(lambda: wounded.is_ready, BACK_S)
        check_greedy(few := mixed(4, seed=100 + seed), asyncio.run(all_tokens(wounded.url, few)))
    except BaseException:
        print(wounded.log())
        raise
    wait_until(lambda: wounded.metric("num_requests_open") == 0, BACK_S)


@pytest.mark.parametrize("wounded", ONE_ON_RAY, ids="-".join, indirect=True, scope="module")
def test_the_streams_of_a_killed_gateway_end_and_it_comes_back(wounded: Deployment) -> None:
    decode, gateway = wounded.pid("decode-0"), wounded.pid("gateway-0")

    async def stream_and_kill() -> None:
        async with client(wounded.url) as http:
            body = Wanted((5, 6, 7), 2000, stream=True, ignore_eos=True).body
            async with aclosing(streamed(http, body)) as chunks:
                assert await anext(chunks)
                with held(decode):  # decoding cannot reach its end before the kill
                    os.kill(gateway, signal.SIGKILL)
                with socket.socket() as thief, pytest.raises(OSError, match="in use"):
                    thief.bind(("127.0.0.1", wounded.port))  # the launcher keeps the port for the next gateway
                with pytest.raises(httpx.RemoteProtocolError):
                    async for _ in chunks:
                        pass

    asyncio.run(stream_and_kill())
    wait_until(lambda: wounded.is_ready, BACK_S, wounded.log)
    assert wounded.metric("num_requests_open") == 0
    check_greedy(few := mixed(4, seed=200), asyncio.run(all_tokens(wounded.url, few)))


@pytest.mark.parametrize("wounded", NONE_ON_RAY, ids="-".join, indirect=True, scope="module")
def test_the_files_of_a_killed_worker_go_when_it_starts_again(wounded: Deployment) -> None:
    wounded.wound("decode-0")
    wait_until(lambda: wounded.is_ready, BACK_S, wounded.log)

    def files() -> list[str]:
        return [path.name for path in wounded.memory.iterdir() if "-decode-0." in path.name]

    wait_until(lambda: len(files()) == 1, BACK_S, lambda: f"{files()} are there")  # the lock of its life


def test_a_part_that_cannot_start_again_is_tried_again_until_it_can(tmp_path: Path) -> None:
    """A part that ran before may fail to start for a passing reason: here its model is away for longer than three quick
    starts take, which ended the deployment once."""
    model, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(MODEL, model)
    with deployed(model=model) as deployment:
        model.rename(away)
        said = deployment.whole_log().count(str(model))
        deployment.wound("decode-0")
        wait_until(lambda: deployment.whole_log().count(str(model)) > said + 3, BACK_S, deployment.log)
        away.rename(model)
        wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
        check_greedy(few := mixed(4, seed=300), asyncio.run(all_tokens(deployment.url, few)))
