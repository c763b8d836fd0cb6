"""Tests of KV that goes from worker to worker: tokens are right, every byte is checked, and a killed end harms no
request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, documents, mixed, tokens_of
from tests.end_to_end.deployment import BACK_S, Deployment, deployed, wait_until
from tests.rare import rare, rarely, thinned

CHECKED = ("--pool-verify-pages", "--log-level", "debug")  # gives the pieces of a transfer checksums too
HURRIED = ("--set", "wire.transfer_timeout_s=10")
FEW_SEATS = ("--max-num-seqs", "3")  # fewer seats than documents: the pool hands out batches, which are prefetched
APART = ("--set", "schedule.helps=false")  # prefill workers run prompts alone, and hold KV for decode workers
# Hardly three documents of the longest kind fit: some leave for a prefill worker.
LITTLE = ("--kv-memory-mb", "3", "--max-model-len", "280", "--set", "schedule.candidate_share=0.9")
AHEAD = {"2+1": "0", "1+2": "1"}  # number of steps planned while one runs
KINDS = [("2+1", "ipc"), ("1+2", "collective"), ("1+2", "ipc"), ("2+1", "collective")]


@pytest.fixture(scope="module", params=[KINDS[0], *(rarely((kind,)) for kind in KINDS[1:])], ids="-".join)
def three(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """Yield a deployment with two workers of one role: a test may kill either."""
    topology, transport = request.param
    flags = ("--transport", transport, *APART, *CHECKED, *HURRIED, *FEW_SEATS, *LITTLE)
    with deployed(*flags, "--set", f"engine.look_ahead={AHEAD[topology]}", topology=topology) as deployment:
        yield deployment


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


def decoders(deployment: Deployment) -> int:
    return 1 + deployment.runs("decode-1")


def test_what_is_prefetched_for_the_next_batch_equals_transformers(three: Deployment) -> None:
    """Prefetched KV waits at the prefill workers until the next batch begins, and is pulled then."""
    chats, noted = mixed(2, seed=8, prompts=(3, 200), outputs=(1, 60)), Noted(three)
    for seed in range(11, 16):  # a worker that has room in time needs nothing that was prefetched
        long = documents(9 * decoders(three), seed=seed, prompts=(40, 160), outputs=(80, 120))
        wanted = [*long, *chats]  # prompts take less time than outputs: the pool runs ahead of two decode workers too
        check_greedy(wanted, asyncio.run(all_tokens(three.url, wanted)))
        if noted.num_prefetched:
            return
    pytest.fail("nothing was prefetched")
    assert three.metric("kv_transfers_failed_total") == 0


def test_by_one_word_the_next_batch_waits_on_prefill_workers(tmp_path: Path) -> None:
    (file := tmp_path / "serve.yaml").write_text("preset: alignedserve\n")
    with deployed("--config", str(file), *CHECKED, *HURRIED, *FEW_SEATS, *LITTLE, topology="1+1") as deployment:
        noted = Noted(deployment)
        for seed in range(11, 16):  # a worker that has room in time needs nothing that was prefetched
            wanted = documents(9, seed=seed, prompts=(40, 160), outputs=(80, 120))
            check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
            if noted.num_prefetched:
                return
    pytest.fail("nothing was prefetched")


@rare  # the tests above hand on in each run
@pytest.mark.parametrize(("transport", "end"), [("ipc", None), ("ipc", "prefill-0"), ("collective", "decode-0")])
def test_what_a_prefill_worker_that_decodes_hands_on_equals_transformers(transport: str, end: str | None) -> None:
    with deployed("--transport", transport, *CHECKED, *HURRIED, topology="1+1") as deployment:
        noted = Noted(deployment)
        for seed in range(8, 12):  # long enough for a move; how many do move depends on what runs when
            wanted = mixed(8, seed=seed, outputs=(80, 140))
            check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
            if noted.num_pulled:
                break
        assert noted.num_pulled > 0
        assert noted.num_asked_ahead == 0, "its memory is for requests of its own"
        assert deployment.metric("kv_transfers_failed_total") == 0
        if end is not None:
            noted = Noted(deployment)
            check_beside_a_kill(deployment, mixed(8, seed=9, outputs=(80, 120)), end, lambda: noted.num_pulled > 1)


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


def test_a_request_that_has_to_leave_for_want_of_memory_comes_back_as_it_was(three: Deployment) -> None:
    """Evicted documents go to a prefill worker, and a decode worker pulls them again."""
    noted = Noted(three)
    for seed in range(13, 18):  # one that ends in time leaves its room to the others
        wanted = documents(6 * decoders(three), seed=seed, prompts=(20, 60), outputs=(90, 120))
        check_greedy(wanted, asyncio.run(all_tokens(three.url, wanted)))
        if noted.count("is pulled from decode-"):
            break
    assert noted.count("is to leave for prefill-") > 0
    assert noted.count("is pulled from decode-") > 0


@pytest.mark.parametrize("end", thinned(["prefill-0", "decode-0"], usual=1))
def test_an_end_that_is_killed_while_a_batch_is_prefetched_harms_nobody(three: Deployment, end: str) -> None:
    """Part of the batch has arrived, part is being copied, and part is not yet sent."""
    noted = Noted(three)
    wanted = documents(6, seed=12, outputs=(20, 40))
    check_beside_a_kill(three, wanted, end, lambda: noted.num_asked_ahead > 1)


@rare  # the test above kills while transfers run too, and tests/transport/test_peers.py peers in mid transfer
@pytest.mark.parametrize("end", ["decode-0", "prefill-0"])
def test_an_end_that_is_killed_in_a_transfer_harms_nobody(three: Deployment, end: str) -> None:
    wanted = [*mixed(8, seed=9, prompts=(3, 200), outputs=(20, 60)), *documents(8, seed=14, outputs=(20, 60))]
    noted = Noted(three)
    check_beside_a_kill(three, wanted, end, lambda: noted.num_pulled > 3)
