"""KV that goes from worker to worker: what is said is right, every byte is checked, and a killed end harms nobody."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.conftest import SOAK
from tests.end_to_end.client import Wanted, all_tokens, check_greedy, mixed
from tests.end_to_end.deployment import Deployment, deployed, wait_until

# Pages have checksums, and so have the pieces of a transfer.
CHECKED = ("--pool-verify-pages", "--wire-transfer-timeout-s", "3")
DIRECT = ("--transport", "collective", *CHECKED)
MAPPED = ("--transport", "ipc", *CHECKED)


AHEAD = {"2+1": "0", "1+2": "1"}  # steps that are planned while one runs


@pytest.fixture(
    params=[("2+1", "collective"), ("1+2", "ipc"), *([("1+2", "collective"), ("2+1", "ipc")] if SOAK else [])]
)
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    topology, transport = request.param
    flags = ("--transport", transport, *CHECKED, "--look-ahead", AHEAD[topology])
    with deployed(*flags, topology=topology) as started:
        yield started


def num_pulled(deployment: Deployment) -> int:
    return deployment.whole_log().count("is pulled from")


def test_what_goes_from_worker_to_worker_equals_transformers(deployment: Deployment) -> None:
    wanted = mixed(32, seed=8)
    check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
    assert num_pulled(deployment) > 0
    assert deployment.metric("kv_transfers_failed_total") == 0


def documents(
    count: int, seed: int, prompts: tuple[int, int] = (60, 200), outputs: tuple[int, int] = (8, 40)
) -> list[Wanted]:
    return [replace(one, tier="flex") for one in mixed(count, seed, prompts=prompts, outputs=outputs)]


def num_prefetched(deployment: Deployment) -> int:
    """That were pulled, once they had been."""
    pulled = set()
    ahead: set[str] = set()
    for line in deployment.whole_log().splitlines():
        for request in re.findall(r"request_id=(\S+)", line):
            if "is prefetched for" in line:
                ahead.add(request)
            elif "is pulled from" in line and request in ahead:
                pulled.add(request)
    return len(pulled)


@pytest.mark.parametrize("topology", ["2+1", "1+2"])
def test_what_is_prefetched_for_the_next_batch_equals_transformers(topology: str) -> None:
    """More documents at once than there are seats: the pool hands out batches, which wait at the prefill workers."""
    with deployed(*DIRECT, "--max-num-seqs", "3", topology=topology) as deployment:
        wanted = documents(30, seed=11)
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert num_prefetched(deployment) > 0
        assert deployment.metric("kv_transfers_failed_total") == 0


def prefetched(deployment: Deployment) -> int:
    return deployment.whole_log().count("is prefetched for")


@pytest.mark.parametrize("end", ["prefill-0", "decode-0"])
def test_an_end_that_is_killed_while_a_batch_is_prefetched_harms_nobody(end: str) -> None:
    """Some of it has come, some is being copied, and some is still asked for."""
    with deployed(*DIRECT, "--max-num-seqs", "3", topology="1+1") as deployment:
        wanted = documents(24, seed=12)

        async def ask() -> list[list[int]]:
            answers = asyncio.ensure_future(all_tokens(deployment.url, wanted))
            await asyncio.to_thread(wait_until, lambda: prefetched(deployment) > 1, 60.0)
            await asyncio.to_thread(deployment.wound, end)
            return await answers

        check_greedy(wanted, asyncio.run(ask()))


def test_who_has_to_leave_for_want_of_memory_comes_back_as_it_was() -> None:
    """Hardly three of these documents fit: they go to the prefill worker, and the decode worker pulls them again."""
    little = ("--kv-memory-mb", "4", "--max-model-len", "400", "--schedule-candidate-share", "0.9")
    with deployed(*DIRECT, *little, "--max-num-seqs", "4", topology="1+1") as deployment:
        wanted = [replace(one, ignore_eos=True) for one in documents(10, seed=13, prompts=(20, 60), outputs=(150, 250))]
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        log = deployment.whole_log()
        assert log.count("is to leave for prefill-0") > 0
        assert log.count("is pulled from decode-0") > 0
        assert deployment.metric("kv_transfers_failed_total") == 0


@pytest.mark.parametrize(
    ("end", "how"),
    [("prefill-0", MAPPED), ("decode-0", DIRECT), *([("prefill-0", DIRECT), ("decode-0", MAPPED)] if SOAK else [])],
)
def test_an_end_that_is_killed_in_a_transfer_harms_nobody(end: str, how: tuple[str, ...]) -> None:
    with deployed(*how, topology="1+1") as deployment:
        # Chats go by the pool where steps take long, as on a busy machine; documents are offered in any case.
        wanted = [*mixed(12, seed=9, outputs=(20, 60)), *documents(12, seed=14, outputs=(20, 60))]

        async def ask() -> list[list[int]]:
            answers = asyncio.ensure_future(all_tokens(deployment.url, wanted))
            await asyncio.to_thread(wait_until, lambda: num_pulled(deployment) > 3, 60.0)
            await asyncio.to_thread(deployment.wound, end)
            return await answers

        check_greedy(wanted, asyncio.run(ask()))
