"""KV that goes from worker to worker: what is said is right, every byte is checked, and a killed end harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.end_to_end.client import all_tokens, check_greedy, mixed
from tests.end_to_end.deployment import Deployment, deployed, wait_until

# Pages have checksums, and so have the pieces of a transfer.
DIRECT = ("--transport", "collective", "--pool-verify-pages", "--wire-transfer-timeout-s", "3")


@pytest.fixture(params=["2+1", "1+2"])
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    with deployed(*DIRECT, topology=request.param) as started:
        yield started


def num_pulled(deployment: Deployment) -> int:
    return deployment.whole_log().count("is pulled from")


def test_what_goes_from_worker_to_worker_equals_transformers(deployment: Deployment) -> None:
    wanted = mixed(32, seed=8)
    check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
    assert num_pulled(deployment) > 0
    assert deployment.metric("alignedserve:kv_transfers_failed_total") == 0


@pytest.mark.parametrize("end", ["prefill", "decode"])
def test_an_end_that_is_killed_in_a_transfer_harms_nobody(end: str) -> None:
    with deployed(*DIRECT, topology="1+1") as deployment:
        wanted = mixed(24, seed=9, outputs=(20, 60))

        async def ask() -> list[list[int]]:
            answers = asyncio.ensure_future(all_tokens(deployment.url, wanted))
            await asyncio.to_thread(wait_until, lambda: num_pulled(deployment) > 3, 60.0)
            await asyncio.to_thread(deployment.wound, end)
            return await answers

        check_greedy(wanted, asyncio.run(ask()))
