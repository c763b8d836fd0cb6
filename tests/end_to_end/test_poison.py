"""Requests that end, or hold up, every worker that runs them: the deployment gives them up, and serves all others.

A folder before all others on the path of Python makes workers fall for requests of certain temperatures, each at its
own place in a step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from alignedserve.launch.keeper import QUICK_DEATH_S
from tests.conftest import SOAK
from tests.end_to_end.client import check_greedy, client, mixed, tokens_of
from tests.end_to_end.deployment import BACK_S, NAME, Deployment, deployed, wait_until

INNOCENTS, MOST_TOKENS = 20, 12
MOST_DEATHS = 3
TEMPERATURES = {"prompt": 0.661, "decode": 0.662, "sampling": 0.663, "end": 0.664, "hang": 0.665}
QUIET_S = QUICK_DEATH_S + 1.0
POISON = """
import importlib.abc, importlib.util, os, signal, sys, time

SIXTH, LAST = 5, {last}


def die(how):
    with open({deaths!r}, "a") as file:
        file.write(f"{{how}}\\n")
    while how == {hang}:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def spoil(engine):
    begin = engine.begin

    def begin_or_die(self, plan):
        parts = [part for part in (*plan.chunks, *plan.decodes) if part.sampling is not None]
        for part in parts:
            how = part.sampling.temperature
            is_decode = part in plan.decodes and part.index >= SIXTH
            if how == {prompt} or (how in ({decode}, {hang}) and is_decode):
                die(how)
        begun = begin(self, plan)
        for part in parts:
            how = part.sampling.temperature
            if (how == {sampling} and part.index >= SIXTH) or (how == {end} and part.index == LAST):
                die(how)
        return begun

    engine.begin = begin_or_die


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "alignedserve.engine.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            spoil(module.Engine)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""
# Each topology, and where in a step the request ends its worker.
TOPOLOGIES = ("colocated", "2xcolocated", "1+1") if SOAK else ("1+1",)
PLACES = ("prompt", "decode", "sampling", "end") if SOAK else ("decode",)


class Poisoned(NamedTuple):
    deployment: Deployment
    deaths: Path  # a line for each

    @property
    def num_deaths(self) -> int:
        return len(self.deaths.read_text().splitlines()) if self.deaths.exists() else 0


@pytest.fixture(scope="module", params=TOPOLOGIES)
def poisoned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poisoned]:
    folder = tmp_path_factory.mktemp("poison")
    deaths = folder / "deaths"
    (folder / "sitecustomize.py").write_text(POISON.format(deaths=str(deaths), last=MOST_TOKENS - 1, **TEMPERATURES))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with deployed(topology=request.param, environment={"PYTHONPATH": path}) as deployment:
        yield Poisoned(deployment, deaths)


@pytest.fixture
def rested(poisoned: Poisoned) -> Poisoned:
    """Wait until workers have been up for a while: part after part that ends at once may end a deployment."""
    since = [time.monotonic()]

    def has_been_ready() -> bool:
        if not poisoned.deployment.is_ready:
            since[0] = time.monotonic()
        return time.monotonic() - since[0] > QUIET_S

    wait_until(has_been_ready, BACK_S, poisoned.deployment.log)
    return poisoned


def body(how: str) -> dict[str, Any]:
    asked = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": MOST_TOKENS}
    return {**asked, "temperature": TEMPERATURES[how], "ignore_eos": True}


@pytest.mark.parametrize("how", PLACES)
def test_a_request_that_ends_its_workers_is_given_up_and_no_other_is_lost(rested: Poisoned, how: str) -> None:
    deployment, before = rested.deployment, rested.num_deaths
    wanted = mixed(INNOCENTS, seed=11, outputs=(150, 200))

    async def attack() -> tuple[httpx.Response, list[list[int]]]:
        served = deployment.metric("generation_tokens_total")
        async with client(deployment.url) as http:
            answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
            while await asyncio.to_thread(deployment.metric, "generation_tokens_total") < served + INNOCENTS:
                await asyncio.sleep(0.02)
            poison = http.post("/v1/chat/completions", json=body(how))
            return await asyncio.wait_for(asyncio.gather(poison, asyncio.gather(*answers)), BACK_S)

    poison, answers = asyncio.run(attack())
    check_greedy(wanted, answers)
    assert poison.status_code == 500, poison.text
    assert poison.json()["error"]["code"] == "request_ends_workers"
    assert poison.headers["x-should-retry"] == "false"
    assert "retry-after" not in poison.headers
    assert rested.num_deaths - before <= MOST_DEATHS
    wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)


def test_a_step_that_never_ends_ends_its_worker_and_its_request(rested: Poisoned) -> None:
    """Meanwhile /ready is 503 and /status says which step is late; then it is a death as any other."""
    deployment, before = rested.deployment, rested.num_deaths
    seen = list[tuple[int, list[dict[str, Any]]]]()

    async def attack() -> httpx.Response:
        async with client(deployment.url) as http:
            poison = asyncio.create_task(http.post("/v1/chat/completions", json=body("hang")))
            while not poison.done():
                ready, status = await asyncio.gather(http.get("/ready"), http.get("/status"))
                seen.append((ready.status_code, status.json()["late"]))
                await asyncio.sleep(0.2)
            return await poison

    answer = asyncio.run(asyncio.wait_for(attack(), BACK_S))
    assert answer.status_code == 500, answer.text
    assert rested.num_deaths - before <= MOST_DEATHS
    assert any(late and late[0]["part"].startswith("decode-") and late[0]["step_s"] > 0 for _, late in seen)
    if deployment.runs("decode-1"):
        assert {code for code, late in seen if late} <= {200, 503}
    else:
        assert 503 in {code for code, late in seen if late}
    assert "has run for" in deployment.whole_log()
    wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
