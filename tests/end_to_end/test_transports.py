"""Tests of KV that goes from worker to worker: tokens are right, every byte is checked, and a killed end harms no
request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence

import httpx
import pytest

from tests.conftest import SOAK
from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, documents, mixed, tokens_of
from tests.end_to_end.deployment import BACK_S, Deployment, deployed, wait_until

CHECKED = ("--pool-verify-pages", "--log-level", "debug")  # gives the pieces of a transfer checksums too
# If no part is killed, no transfer fails, however long a process stands still.
PATIENT = ("--set", "wire.transfer_timeout_s=120", "--wire-death-s", "60")
HURRIED = ("--set", "wire.transfer_timeout_s=3")
FEW_SEATS = ("--max-num-seqs", "3")  # fewer seats than documents: the pool hands out batches, which are prefetched
APART = ("--set", "schedule.helps=false")  # prefill workers run prompts alone, and hold KV for decode workers
AHEAD = {"2+1": "0", "1+2": "1"}  # number of steps planned while one runs
KINDS = [("2+1", "collective"), ("1+2", "ipc"), *([("1+2", "collective"), ("2+1", "ipc")] if SOAK else [])]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def three(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """Yield a deployment with two workers of one role."""
    topology, transport = request.param
    flags = (
        "--transport",
        transport,
        *APART,
        *CHECKED,
        *PATIENT,
        *FEW_SEATS,
        "--set",
        f"engine.look_ahead={AHEAD[topology]}",
    )
    with deployed(*flags, topology=topology) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """Yield a deployment with one worker of each role, either of which may be killed."""
    with deployed("--transport", request.param, *APART, *CHECKED, *HURRIED, *FEW_SEATS, topology="1+1") as deployment:
        yield deployment


def two_by(transport: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("two", [transport], indirect=True, scope="module")


class Noted:
    """What a deployment logs from here on."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment, self._begins = deployment, len(deployment.whole_log())

    @property
    def lines(self) -> Sequence[str]:
        return self._deployment.whole_log()[self._begins :].splitlines()

    def count(self, said: str) -> int:
        return sum(said in line for line in self.lines)

    @property
    def num_pulled(self) -> int:
        return self.count("is pulled from")

    @property
    def num_asked_ahead(self) -> int:
        return self.count("is prefetched for")

    @property
    def num_prefetched(self) -> int:
        """Return how many requests were prefetched and then pulled."""
        pulled, ahead = set[str](), set[str]()
        for line in self.lines:
            for request in re.findall(r"request_id=(\S+)", line):
                if "is prefetched for" in line:
                    ahead.add(request)
                elif "is pulled from" in line and request in ahead:
                    pulled.add(request)
        return len(pulled)


def test_what_is_prefetched_for_the_next_batch_equals_transformers(three: Deployment) -> None:
    """Prefetched KV waits at the prefill workers until the next batch begins, and is pulled then."""
    wanted, noted = [*documents(18, seed=11, outputs=(30, 80)), *mixed(4, seed=8)], Noted(three)
    check_greedy(wanted, asyncio.run(all_tokens(three.url, wanted)))
    assert noted.num_prefetched > 0
    assert three.metric("kv_transfers_failed_total") == 0


# test_ranks.py hands on by `collective` too.
@pytest.mark.parametrize(("transport", "end"), [*([("collective", "decode-0")] if SOAK else []), ("ipc", "prefill-0")])
def test_what_a_prefill_worker_that_decodes_hands_on_equals_transformers(transport: str, end: str) -> None:
    with deployed("--transport", transport, *CHECKED, *HURRIED, topology="1+1") as deployment:
        wanted, noted = mixed(12, seed=8, outputs=(80, 160)), Noted(deployment)
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert noted.num_pulled > 0
        assert noted.num_asked_ahead == 0, "its memory is for requests of its own"
        assert deployment.metric("kv_transfers_failed_total") == 0
        noted = Noted(deployment)
        check_beside_a_kill(deployment, mixed(12, seed=9, outputs=(80, 160)), end, lambda: noted.num_pulled > 2)


def check_beside_a_kill(deployment: Deployment, wanted: list[Wanted], end: str, has_begun: Callable[[], bool]) -> None:
    """Check every answer. Kill this end as soon as `has_begun`; until then each request is sent again and again."""
    asked, answers, is_killed = list[Wanted](), list[list[int]](), asyncio.Event()

    async def ask(http: httpx.AsyncClient, request: Wanted) -> None:
        while True:
            answers.append(await tokens_of(http, request))
            asked.append(request)
            if is_killed.is_set():
                return

    async def ask_and_kill() -> None:
        async with client(deployment.url) as http:
            asking = asyncio.gather(*(ask(http, request) for request in wanted))
            await asyncio.to_thread(wait_until, lambda: has_begun() or asking.done(), BACK_S)
            await asyncio.to_thread(deployment.wound, end)
            is_killed.set()
            await asking

    asyncio.run(ask_and_kill())
    check_greedy(asked, answers)


# The short form kills one end while a batch is prefetched, and the other in a transfer.
@two_by("collective")
@pytest.mark.parametrize("end", ["prefill-0", *(["decode-0"] if SOAK else [])])
def test_an_end_that_is_killed_while_a_batch_is_prefetched_harms_nobody(two: Deployment, end: str) -> None:
    """Part of the batch has arrived, part is being copied, and part is not yet sent."""
    noted = Noted(two)
    wanted = documents(12, seed=12, outputs=(30, 80))
    check_beside_a_kill(two, wanted, end, lambda: noted.num_asked_ahead > 1)


def check_a_kill_in_a_transfer(deployment: Deployment, end: str) -> None:
    wanted = [*mixed(8, seed=9, outputs=(20, 60)), *documents(8, seed=14, outputs=(20, 60))]
    noted = Noted(deployment)
    check_beside_a_kill(deployment, wanted, end, lambda: noted.num_pulled > 3)


@two_by("collective")
@pytest.mark.parametrize("end", ["decode-0", *(["prefill-0"] if SOAK else [])])
def test_an_end_that_is_killed_in_a_transfer_harms_nobody(two: Deployment, end: str) -> None:
    check_a_kill_in_a_transfer(two, end)


@pytest.mark.skipif(not SOAK, reason="tests/transport/test_peers.py kills and stops peers in such a transfer")
@two_by("ipc")
@pytest.mark.parametrize("end", ["prefill-0", "decode-0"])
def test_a_worker_with_mapped_memory_does_not_either(two: Deployment, end: str) -> None:
    check_a_kill_in_a_transfer(two, end)


def test_a_request_that_has_to_leave_for_want_of_memory_comes_back_as_it_was() -> None:
    """Hardly three of these documents fit: evicted ones go to the prefill worker, and the decode worker pulls them
    again."""
    little = ("--kv-memory-mb", "4", "--max-model-len", "400", "--set", "schedule.candidate_share=0.9")
    few = ("--transport", "collective", *APART, *CHECKED, *PATIENT, "--max-num-seqs", "4")
    with deployed(*few, *little, topology="1+1") as deployment:
        wanted = documents(6, seed=13, prompts=(20, 60), outputs=(150, 220))
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        log = deployment.whole_log()
        assert log.count("is to leave for prefill-0") > 0
        assert log.count("is pulled from decode-0") > 0
        assert deployment.metric("kv_transfers_failed_total") == 0
