"""Tests of `alignedserve restart` under load: every process is another one, and no client notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from alignedserve.core import Role
from alignedserve.signs import ExitCode
from tests.end_to_end.client import Wanted, check_greedy, client, command, mixed, tokens_of
from tests.end_to_end.deployment import BACK_S, Deployment, deployed, free_port, part_of
from tests.end_to_end.test_succession import followed
from tests.rare import rare

STREAM = 300  # tokens
DRAIN = ("--set", f"server.drain_s={BACK_S}")  # what a stream takes on a slow machine


@dataclass
class Load:
    """Clients that ask again as soon as they are answered: long streams on kept connections, short requests that each
    open a connection."""

    url: str
    wanted: list[Wanted] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    is_over: bool = False

    async def stream(self, seed: int) -> None:
        (prompt,) = mixed(1, seed)
        async with client(self.url) as http:
            while not self.is_over:
                await self._ask(http, Wanted(prompt.prompt, STREAM, stream=True, ignore_eos=True))

    async def knock(self, seed: int) -> None:
        (prompt,) = mixed(1, seed, prompts=(3, 20))
        while not self.is_over:
            async with client(self.url) as http:
                await self._ask(http, replace(prompt, max_tokens=2))

    async def _ask(self, http: object, wanted: Wanted) -> None:
        output = await tokens_of(http, wanted)  # pyrefly: ignore[bad-argument-type]
        self.wanted.append(wanted)
        self.outputs.append(output)


@asynccontextmanager
async def loaded(url: str, streams: int = 4) -> AsyncIterator[Load]:
    """Yield a load that runs; end it, and check that each answer came whole and is exact."""
    load = Load(url)
    clients = [asyncio.create_task(load.stream(seed)) for seed in range(streams)]
    clients.append(asyncio.create_task(load.knock(99)))
    while len(load.wanted) < 2 * streams:
        await asyncio.sleep(0.05)
    try:
        yield load
    finally:
        load.is_over = True
        await asyncio.wait_for(asyncio.gather(*clients), BACK_S)
        check_greedy(load.wanted, load.outputs)
        long = sum(len(output) == STREAM for output in load.outputs)
        print(f"{long} streams of {STREAM} tokens and {len(load.outputs) - long} short answers came whole")


def under_load(deployment: Deployment, act: Callable[[], None]) -> None:
    async def run() -> None:
        async with loaded(deployment.url):
            await asyncio.to_thread(act)

    asyncio.run(run())


def parts_of(processes: dict[int, str]) -> dict[int, str]:
    """Return the processes that are parts: pid -> name."""
    parts = {pid: part_of(command) for pid, command in processes.items()}
    return {pid: part for pid, part in parts.items() if part and part.partition("-")[0] in {*Role}}


def restart(deployment: Deployment, *flags: str) -> None:
    done = command("restart", "--port", str(deployment.port), *flags)
    assert done.returncode == 0, done.stderr
    assert "all parts are new after " in done.stdout


@rare
def test_the_next_version_takes_over_and_replaces_every_part_under_load() -> None:
    """The launcher ends alone, another one goes on with its parts, and replaces them."""
    with followed(*DRAIN) as deployment:
        before = parts_of(deployment.processes())

        def upgrade() -> None:
            left = command("stop", "--launcher", "--port", str(deployment.port))
            assert left.returncode == 0, left.stderr
            assert deployment.ended() == ExitCode.LAUNCHER_GONE
            assert parts_of(deployment.processes()).keys() >= before.keys()
            deployment.launch_again()
            restart(deployment)

        under_load(deployment, upgrade)
        after = parts_of(deployment.processes())
        assert not before.keys() & after.keys()
        assert sorted(after.values()) == ["decode-1", "gateway-1", "jobs-0", "pool-0", "prefill-1", "router"]


@rare
@pytest.mark.parametrize("flags", [(), ("--in-place",)], ids=["spares", "in place"])
def test_two_gateways_and_two_workers_are_replaced_under_load(flags: tuple[str, ...]) -> None:
    with deployed("--port", str(free_port()), "--gateways", "2", *DRAIN, topology="2xcolocated") as deployment:
        before = parts_of(deployment.processes())
        under_load(deployment, lambda: restart(deployment, *flags))
        assert not before.keys() & parts_of(deployment.processes()).keys()
        under_load(deployment, lambda: restart(deployment, *flags))


@rare
def test_on_ray_every_part_is_replaced_under_load() -> None:
    with deployed(*DRAIN, topology="1+1", launcher="ray") as deployment:
        under_load(deployment, lambda: restart(deployment))
