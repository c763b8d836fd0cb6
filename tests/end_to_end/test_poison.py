"""Requests that end, or hold up, every process that works on them: the deployment gives them up, and serves all others.

tests/poison has all kinds, and a program that tries them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.client import client
from tests.end_to_end.deployment import BACK_S, Deployment, wait_until
from tests.poison.places import BY_NAME, DIRECT, PLACES
from tests.poison.trial import MOST_DEATHS, Trials
from tests.rare import rare, thinned

# Each topology, and where and how a request strikes.
TOPOLOGIES = thinned(["1+1", "colocated", "2xcolocated"], usual=1)
KINDS = thinned(
    [
        *(("sixth decode on", "SIGKILL"), ("first chunk", "SIGSEGV"), ("sampling", "exit 0"), ("last decode", "panic")),
        *(("worker: StepDone", "error"), ("owner: Opened", "error")),
        *(("router: Submit", "SIGKILL"), ("router: placing", "exit 0"), ("line", "SIGKILL")),
        *(("frame out", "error"), ("detokeniser", "panic")),
    ],
    usual=1,
)


@pytest.fixture(scope="module", params=TOPOLOGIES)
def trials(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Trials, Deployment]]:
    folder = tmp_path_factory.mktemp("poison")
    trials = Trials(request.param, folder, folder)
    with trials.deployed() as deployment:
        yield trials, deployment


@pytest.mark.parametrize(("place", "way"), KINDS)
def test_poison_is_given_up_and_no_other_request_is_lost(
    trials: tuple[Trials, Deployment], place: str, way: str
) -> None:
    tried, deployment = trials
    row = tried.run(deployment, BY_NAME[place], way)
    assert not row.problems, row
    assert row.strikes, row
    assert len(row.deaths) <= MOST_DEATHS
    assert row.said.split()[0] in ("500", "503", "error"), row
    if place in ("sixth decode on", "first chunk", "sampling", "last decode", "worker: StepDone"):
        assert row.said == "500 request_ends_workers"


@rare
@pytest.mark.parametrize("topology", ["1+1", "2+2"])
def test_a_request_comes_to_every_place(topology: str, tmp_path: Path) -> None:
    """A place whose function nothing calls any more is tried in vain. Where KV goes from worker to worker, it need not
    come to the pool."""
    trials = Trials(topology, tmp_path, tmp_path)
    places = [place for place in PLACES if (place.topologies == DIRECT) == (topology in DIRECT)]
    with trials.deployed() as deployment:
        assert not [place.name for place in places if not trials.is_reached(deployment, place)]


@rare  # test_hangs.py has a worker that hangs between two steps
def test_a_step_that_never_ends_ends_its_worker_and_its_request(trials: tuple[Trials, Deployment]) -> None:
    """Meanwhile /ready is 503 and /status says which step is late; then it is a death as any other."""
    tried, deployment = trials
    seen = list[tuple[int, list[dict[str, object]]]]()

    async def attack() -> httpx.Response:
        path, body = tried.poison.arm("sixth decode on", "sleeps")
        async with client(deployment.url) as http:
            poison = asyncio.create_task(http.post(path, json=body))
            while not poison.done():
                ready, status = await asyncio.gather(http.get("/ready"), http.get("/status"))
                seen.append((ready.status_code, status.json()["late"]))
                await asyncio.sleep(0.2)
            return await poison

    strikes = tried.poison.num_strikes
    answer = asyncio.run(asyncio.wait_for(attack(), BACK_S))
    tried.poison.disarm()
    assert answer.status_code == 500, answer.text
    assert answer.headers["x-should-retry"] == "false"
    assert tried.poison.num_strikes - strikes <= MOST_DEATHS
    late = [(code, told[0]) for code, told in seen if told]
    assert any(str(told["part"]).startswith(("decode-", "prefill-")) for _, told in late)
    if deployment.runs("decode-1"):
        assert {code for code, _ in late} <= {200, 503}
    else:
        assert 503 in {code for code, _ in late}
    assert "has run for" in deployment.whole_log()
    wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
