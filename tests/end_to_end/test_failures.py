"""Tests that every killed part comes back, and that every accepted request ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path

import httpx
import pytest

from tests.conftest import SOAK
from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, mixed, streamed, tokens_of
from tests.end_to_end.deployment import (
    BACK_S,
    MODEL,
    NONE_ON_RAY,
    Deployment,
    Kind,
    deployed,
    held,
    replace_weights,
    wait_until,
)
from tests.rare import rare, rarely

REQUESTS = 6
# A decode worker is killed by test_adapters.py and others, a prefill worker by test_transports.py, and a pool by
# test_little_memory.py.
OFTEN = ("router",)
SEEDS = range(10 if SOAK else 1)
# The short form has the topology with more parts.
HURT = NONE_ON_RAY if SOAK else [("1+1", "local")]
PARTS = {
    "colocated": ["decode-0", "router"],
    "1+1": ["decode-0", "router", "prefill-0", "pool-0"],
}


@pytest.fixture(scope="module", params=HURT, ids="-".join)
def wounded(request: pytest.FixtureRequest, model: Path) -> Iterator[Deployment]:
    """Yield a deployment of each kind for all tests, since a killed part leaves the other parts unchanged."""
    topology, launcher = request.param
    with deployed(topology=topology, launcher=launcher, model=model) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that may be moved away for a while."""
    return Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("moved") / "model"))


def each_part(kinds: list[Kind]) -> pytest.MarkDecorator:
    """Parametrize (wounded, part)."""
    cases = [(kind, part) for kind in kinds for part in PARTS[kind[0]]]
    return pytest.mark.parametrize(
        ("wounded", "part"),
        [case if case[1] in OFTEN else rarely(case) for case in cases],
        indirect=["wounded"],
        ids=[f"{'-'.join(kind)}-{part}" for kind, part in cases],
        scope="module",
    )


@pytest.mark.parametrize("seed", SEEDS)
@each_part(HURT)
def test_a_killed_part_comes_back_and_no_token_is_lost(wounded: Deployment, part: str, seed: int) -> None:
    check_no_token_is_lost(wounded, part, seed)


@rare
@pytest.mark.parametrize("wounded", [kind for kind in HURT if kind[0] == "1+1"], ids="-".join, indirect=True)
def test_a_prefill_worker_that_decodes_comes_back_and_no_token_is_lost(wounded: Deployment) -> None:
    """Outputs this short end on the worker of their prompts."""
    check_no_token_is_lost(wounded, "prefill-0", seed=50, outputs=(30, 50))


def check_no_token_is_lost(deployment: Deployment, part: str, seed: int, outputs: tuple[int, int] = (40, 70)) -> None:
    wanted = mixed(REQUESTS, seed=seed, outputs=outputs)

    async def serve_and_kill() -> list[list[int]]:
        before = deployment.metric("generation_tokens_total")
        async with client(deployment.url) as http:
            answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
            while await asyncio.to_thread(deployment.metric, "generation_tokens_total") < before + 5 * REQUESTS:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(deployment.wound, part)
            return await asyncio.wait_for(asyncio.gather(*answers), BACK_S)

    try:
        check_greedy(wanted, asyncio.run(serve_and_kill()))
        wait_until(lambda: deployment.is_ready, BACK_S)
        check_greedy(few := mixed(2, seed=100 + seed, outputs=(1, 60)), asyncio.run(all_tokens(deployment.url, few)))
    except BaseException:
        print(deployment.log())
        raise
    wait_until(lambda: deployment.metric("num_requests_open") == 0, BACK_S)


def test_the_streams_of_a_killed_gateway_end_and_it_comes_back(wounded: Deployment) -> None:
    check_a_killed_gateway(wounded)


def check_a_killed_gateway(deployment: Deployment) -> None:
    decode, gateway = deployment.pid("decode-0"), deployment.pid("gateway-0")

    async def stream_and_kill() -> None:
        async with client(deployment.url) as http:
            body = Wanted((5, 6, 7), 2000, stream=True, ignore_eos=True).body
            async with aclosing(streamed(http, body)) as chunks:
                assert await anext(chunks)
                with held(decode):  # decoding cannot reach its end before the kill
                    os.kill(gateway, signal.SIGKILL)
                with socket.socket() as thief, pytest.raises(OSError, match="in use"):
                    thief.bind(("127.0.0.1", deployment.port))  # the launcher keeps the port for the next gateway
                with pytest.raises(httpx.RemoteProtocolError):
                    async for _ in chunks:
                        pass

    asyncio.run(stream_and_kill())
    wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
    assert deployment.metric("num_requests_open") == 0
    check_greedy(few := mixed(2, seed=200, outputs=(1, 60)), asyncio.run(all_tokens(deployment.url, few)))


def test_the_files_of_a_killed_worker_go_when_it_starts_again(wounded: Deployment) -> None:
    wounded.wound("decode-0")
    wait_until(lambda: wounded.is_ready, BACK_S, wounded.log)

    def files() -> list[str]:
        return [path.name for path in wounded.memory.iterdir() if "-decode-0." in path.name]

    wait_until(lambda: len(files()) == 1, BACK_S, lambda: f"{files()} are there")  # the lock of its life


@rare  # tests/launch/test_keeper.py has the pauses
@pytest.mark.parametrize("wounded", HURT, ids="-".join, indirect=True)
def test_a_part_that_cannot_start_again_is_tried_again_until_it_can(wounded: Deployment, model: Path) -> None:
    """A part that ran before may fail to start for a passing reason: here its model is away for longer than three quick
    starts take, which ended the deployment once. The death of another part does not end it meanwhile."""
    away = model.with_name("away")
    model.rename(away)
    said = wounded.whole_log().count(str(model))
    wounded.wound("decode-0")
    wait_until(lambda: wounded.whole_log().count(str(model)) > said + 3, BACK_S, wounded.log)
    assert "decode-0 does not stay up: it is started again in" in wounded.whole_log()
    wounded.wound("router")
    away.rename(model)
    wait_until(lambda: wounded.is_ready, BACK_S, wounded.log)
    # A router that is killed leaves a process of its own behind, and the launcher waits for that.
    wait_until(lambda: len(zombies_of(wounded.process.pid)) <= 1, BACK_S, wounded.log)
    check_greedy(few := mixed(2, seed=300, outputs=(1, 60)), asyncio.run(all_tokens(wounded.url, few)))


def zombies_of(launcher: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == launcher:
                found.append(stat.read_text())
    return found


@rare  # tests/engine/test_replaced_weights.py has the refusal
@pytest.mark.parametrize("wounded", [kind for kind in HURT if kind[0] == "1+1"], ids="-".join, indirect=True)
def test_weights_that_are_replaced_under_a_deployment_answer_nothing(wounded: Deployment, model: Path) -> None:
    ours, weights = replace_weights(model), model / "model.safetensors"
    wounded.wound("decode-0")
    with suppress(AssertionError):  # where it is not refused, the answers below are the other model's
        wait_until(lambda: "decode-0 does not mix them" in wounded.whole_log(), 20.0)
        ours.replace(weights)
    wait_until(lambda: wounded.is_ready, BACK_S, wounded.log)
    check_greedy(few := mixed(4, seed=400, outputs=(100, 200)), asyncio.run(all_tokens(wounded.url, few)))
