"""Tests of workers with two ranks each: they say what one process says, and a worker comes back whichever rank is
killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.conftest import SOAK
from tests.end_to_end.client import all_tokens, check_greedy, client, documents, mixed, tokens_of
from tests.end_to_end.deployment import BACK_S, KINDS, Deployment, deployed, wait_until
from tests.end_to_end.test_scale import parts, serve_while
from tests.rare import rare

REQUESTS = 40 if SOAK else 4
FEW = [("1+1", "local", "collective")]
ALL = [*((*kind, "host") for kind in KINDS), FEW[0], ("1+1", "ray", "ipc")]


@pytest.fixture(scope="module", params=ALL if SOAK else FEW, ids="-".join)
def ranked(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    topology, launcher, transport = request.param
    ahead = "1" if launcher == "local" else "0"
    flags = ("--tensor-parallel-size", "2", "--pool-verify-pages", "--transport", transport, "--log-level", "debug")
    look_ahead = ("--set", f"engine.look_ahead={ahead}")
    with deployed(*flags, *look_ahead, topology=topology, launcher=launcher) as deployment:
        yield deployment


@rare  # tests/engine/test_ranks.py has ranks in each run, and tests/transport links of `collective`
def test_two_ranks_say_what_transformers_says(ranked: Deployment, request: pytest.FixtureRequest) -> None:
    wanted = [*mixed(REQUESTS, seed=3, outputs=(1, 40)), *documents(2, seed=5)]
    check_greedy(wanted, asyncio.run(all_tokens(ranked.url, wanted)))
    is_direct = not request.node.callspec.id.endswith("host")
    for seed in range(6, 10):  # long enough for a move; how many do move depends on what runs when
        check_greedy(alone := mixed(4, seed=seed, outputs=(80, 120)), asyncio.run(all_tokens(ranked.url, alone)))
        if not is_direct or "is pulled from" in ranked.whole_log():
            break
    assert ("is pulled from" in ranked.whole_log()) is is_direct, "rank to rank"


@rare  # test_on_ray.py kills a rank
@pytest.mark.parametrize("part", ["decode-0-rank-1", "decode-0"])
def test_a_worker_with_a_killed_rank_comes_back_and_no_token_is_lost(ranked: Deployment, part: str) -> None:
    check_a_killed_rank(ranked, part)


@rare
def test_a_rank_that_stands_still_ends_with_one_that_is_killed(ranked: Deployment) -> None:
    """A rank whose kernel waits for a lost rank stands still like this one."""
    check_a_killed_rank(ranked, "decode-0-rank-1", still="decode-0")
    check_a_killed_rank(ranked, "decode-0", still="decode-0-rank-1")


def check_a_killed_rank(ranked: Deployment, part: str, still: str = "") -> None:
    wanted = mixed(REQUESTS, seed=4, outputs=(40, 80))
    earlier = {ranked.pid(name) for name in ("decode-0", "decode-0-rank-1")}

    async def serve_and_kill() -> list[list[int]]:
        before = ranked.metric("generation_tokens_total")
        async with client(ranked.url) as http:
            answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
            while await asyncio.to_thread(ranked.metric, "generation_tokens_total") < before + 3 * REQUESTS:
                await asyncio.sleep(0.02)
            if still:
                os.kill(ranked.pid(still), signal.SIGSTOP)
            await asyncio.to_thread(ranked.wound, part)
            return await asyncio.wait_for(asyncio.gather(*answers), BACK_S)

    check_greedy(wanted, asyncio.run(serve_and_kill()))
    wait_until(lambda: ranked.is_ready, BACK_S, ranked.log)
    assert not earlier & ranked.processes().keys(), "the ranks of the life before have all ended"


@rare  # test_on_ray.py adds ranks, and test_scale.py workers
def test_workers_of_two_ranks_come_and_go(ranked: Deployment) -> None:
    check_ranks_come_and_go(ranked)


def check_ranks_come_and_go(ranked: Deployment) -> None:
    names = {"decode-1", "decode-1-rank-1"}
    assert serve_while(ranked, mixed(2, seed=31), "scale", "--decode", "2")
    wait_until(lambda: "decode-1" in parts(ranked), BACK_S, ranked.log)
    assert all(map(ranked.runs, names))
    for seed in range(33, 43):  # it need not be used as soon as it is there
        if "decode-1: ended request_id" in ranked.whole_log():
            break
        more = mixed(8 * REQUESTS, seed=seed, outputs=(20, 50))
        check_greedy(more, asyncio.run(all_tokens(ranked.url, more)))
    wanted = mixed(2 * REQUESTS, seed=32, outputs=(20, 50))
    check_greedy(wanted, serve_while(ranked, wanted, "scale", "--decode", "1"))
    assert "decode-1" not in parts(ranked)
    assert "decode-1: ended request_id" in ranked.whole_log(), "it was used"
    assert "decode-1 ended with" not in ranked.whole_log(), "it was not killed, and not started again"
    wait_until(lambda: not any(map(ranked.runs, names)), BACK_S, ranked.log)
