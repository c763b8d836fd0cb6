"""Requests that end, or hold up, every worker that runs them: the deployment gives them up, and serves all others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from alignedserve.launch.keeper import QUICK_DEATH_S
from tests.end_to_end.client import check_greedy, client, mixed, tokens_of
from tests.end_to_end.deployment import BACK_S, NAME, Deployment, deployed, wait_until
from tests.planted import Poison, poisonous
from tests.rare import rare, thinned

INNOCENTS = 6
MOST_DEATHS = 3
QUIET_S = QUICK_DEATH_S + 1.0
# Each topology, and where in a step the request ends its worker.
TOPOLOGIES = thinned(["1+1", "colocated", "2xcolocated"], usual=1)
PLACES = thinned(["decode", "prompt", "sampling", "end", "router", "worker", "owner"], usual=1)


class Poisoned(NamedTuple):
    deployment: Deployment
    poison: Poison


@pytest.fixture(scope="module", params=TOPOLOGIES)
def poisoned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poisoned]:
    poison = Poison(tmp_path_factory.mktemp("poison"))
    with deployed(topology=request.param, plant=poison.plant) as deployment:
        yield Poisoned(deployment, poison)


@pytest.fixture
def rested(poisoned: Poisoned) -> Poisoned:
    """Wait until workers have been up for a while: part after part that ends at once may end a deployment."""
    since = [time.monotonic() if poisoned.poison.num_deaths else -QUIET_S]

    def has_been_ready() -> bool:
        if not poisoned.deployment.is_ready:
            since[0] = time.monotonic()
        return time.monotonic() - since[0] > QUIET_S

    wait_until(has_been_ready, BACK_S, poisoned.deployment.log)
    return poisoned


@pytest.mark.parametrize("how", PLACES)
def test_a_request_that_ends_its_workers_is_given_up_and_no_other_is_lost(rested: Poisoned, how: str) -> None:
    deployment, before = rested.deployment, rested.poison.num_deaths
    wanted = mixed(INNOCENTS, seed=11, outputs=(100, 150))

    async def attack() -> tuple[httpx.Response, list[list[int]]]:
        served = deployment.metric("generation_tokens_total")
        async with client(deployment.url) as http:
            answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
            while await asyncio.to_thread(deployment.metric, "generation_tokens_total") < served + INNOCENTS:
                await asyncio.sleep(0.02)
            poison = http.post("/v1/chat/completions", json=poisonous(NAME, how))
            return await asyncio.wait_for(asyncio.gather(poison, asyncio.gather(*answers)), BACK_S)

    poison, answers = asyncio.run(attack())
    check_greedy(wanted, answers)
    assert poison.status_code == 500, poison.text
    assert poison.json()["error"]["code"] == "request_ends_workers"
    assert poison.headers["x-should-retry"] == "false"
    assert "retry-after" not in poison.headers
    assert rested.poison.num_deaths - before <= MOST_DEATHS
    wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)


@rare  # test_hangs.py has a worker that hangs between two steps
def test_a_step_that_never_ends_ends_its_worker_and_its_request(rested: Poisoned) -> None:
    """Meanwhile /ready is 503 and /status says which step is late; then it is a death as any other."""
    deployment, before = rested.deployment, rested.poison.num_deaths
    seen = list[tuple[int, list[dict[str, Any]]]]()

    async def attack() -> httpx.Response:
        async with client(deployment.url) as http:
            poison = asyncio.create_task(http.post("/v1/chat/completions", json=poisonous(NAME, "hang")))
            while not poison.done():
                ready, status = await asyncio.gather(http.get("/ready"), http.get("/status"))
                seen.append((ready.status_code, status.json()["late"]))
                await asyncio.sleep(0.2)
            return await poison

    answer = asyncio.run(asyncio.wait_for(attack(), BACK_S))
    assert answer.status_code == 500, answer.text
    assert rested.poison.num_deaths - before <= MOST_DEATHS
    assert any(
        late and late[0]["part"].startswith(("decode-", "prefill-")) and late[0]["step_s"] > 0 for _, late in seen
    )
    if deployment.runs("decode-1") or deployment.runs("prefill-0"):  # which decodes too
        assert {code for code, late in seen if late} <= {200, 503}
    else:
        assert 503 in {code for code, late in seen if late}
    assert "has run for" in deployment.whole_log()
    wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
