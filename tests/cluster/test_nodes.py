"""Tests on several nodes: what runs where, a node that is lost, a node that is added."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from alignedserve.launch.keeper import QUICK_DEATH_S
from tests.cluster.conftest import Nodes, clustered, deployed_on
from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, documents, mixed, tokens_of
from tests.end_to_end.deployment import (
    BACK_S,
    GONE_S,
    START_S,
    Deployment,
    held,
    part_of,
    shared_memory,
    spawn,
    wait_until,
)
from tests.end_to_end.test_scale import serve_while
from tests.rare import rare

HEAD = {"CPU": 0}
SOON_S = 45.0  # sooner than any call to Ray gives up
SPLIT = {"CPU": 4, "kv_pool": 1, "prefill": 1, "decode": 1}
PROMPTS, WITH_POOL = {"CPU": 2, "prefill": 2}, {"CPU": 2, "kv_pool": 1, "decode": 1}
FED = "--transport collective --pool-verify-pages --set wire.transfer_timeout_s=3 --log-level debug".split()
FED += ["--set", "schedule.helps=false"]  # prefill workers run prompts alone, and hand all on


def served_while(deployment: Deployment, wanted: list[Wanted], act: Callable[[], None]) -> list[list[int]]:
    """Return the outputs of the requests; act once all of them are running."""

    async def serve() -> list[list[int]]:
        before = deployment.metric("generation_tokens_total")
        async with client(deployment.url) as http:
            answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
            while await asyncio.to_thread(deployment.metric, "generation_tokens_total") < before + 5 * len(wanted):
                await asyncio.sleep(0.02)
            await asyncio.to_thread(act)
            return await asyncio.wait_for(asyncio.gather(*answers), BACK_S)

    return asyncio.run(serve())


def test_a_deployment_on_two_nodes_from_its_start_to_its_end() -> None:
    """A pool and its worker are fed from another node. More come on a third node, and go on alone when the first are
    lost under load. At last the cluster hangs: Ray itself would wait for its head for ever, and a second Ctrl-C ends
    the deployment."""
    with clustered(PROMPTS, WITH_POOL) as nodes, shared_memory() as memory:
        (left := memory / "alignedserve-1-pool-0.lock").touch()
        where = ("--ray-address", nodes.address, "--set", "ray.place_s=2", *FED)
        with ended(
            Deployment(*where, topology="1+1", launcher="ray", memory=memory, environment=nodes.environment)
        ) as deployment:
            assert not left.exists(), "what a killed launcher has left goes with a start"
            lost, head = nodes.home("decode-0"), nodes.home("router")
            assert nodes.home("pool-0") == lost != head == nodes.home("prefill-0")
            check_greedy(few := mixed(6, seed=1, outputs=(1, 60)), asyncio.run(all_tokens(deployment.url, few)))
            assert pulled_by(deployment) == {"decode-0"}

            left.touch()
            nodes.add(WITH_POOL)
            assert serve_while(deployment, mixed(2, seed=31, outputs=(30, 60)), "scale", "--decode", "2")
            wait_until(lambda: parts_of(deployment).keys() >= {"pool-1", "decode-1"}, BACK_S, deployment.log)
            assert not left.exists(), "what is left on a node that comes later goes with the start of a part there"
            assert nodes.home("pool-1") == nodes.home("decode-1") not in (lost, head)
            wanted = mixed(6, seed=2, outputs=(40, 90))
            check_greedy(wanted, served_while(deployment, wanted, lambda: nodes.kill(1)))

            with held(nodes.gcs_server()):
                deployment.send(signal.SIGINT)
                assert deployment.stop(signal.SIGTERM, within_s=SOON_S) == 0
            assert "alignedserve: the end hangs in " in deployment.log()
            wait_until(lambda: not any(map(part_of, nodes.processes().values())), GONE_S, deployment.log)


@contextmanager
def ended(deployment: Deployment) -> Iterator[Deployment]:
    try:
        yield deployment
    finally:
        deployment.kill()
        deployment.forget()


@rare  # the test above shows most of it
def test_a_split_deployment_moves_to_another_node_when_its_own_is_lost() -> None:
    with clustered(HEAD, SPLIT) as nodes, deployed_on(nodes, "1+1") as deployment:
        ours, head = nodes.home("decode-0"), nodes.home("router")
        assert {nodes.home(part) for part in ("pool-0", "prefill-0")} == {ours}, "they share its memory"
        assert nodes.home("gateway-0") == head != ours
        check_greedy(few := mixed(6, seed=1), asyncio.run(all_tokens(deployment.url, few)))

        def move() -> None:
            nodes.add(SPLIT)
            nodes.kill(1)

        wanted = mixed(12, seed=2, outputs=(60, 200))
        check_greedy(wanted, served_while(deployment, wanted, move))
        assert nodes.home("decode-0") not in (ours, head)
        assert nodes.home("gateway-0") == head


@rare
@pytest.mark.parametrize("lends", ["always", "never"])
def test_each_node_has_both_kinds_where_no_kv_goes_from_node_to_node(lends: str) -> None:
    """The nodes name no roles."""
    each, apart = {"CPU": 2}, ("--prefill-lends", lends)
    with clustered(HEAD, each, each) as nodes, deployed_on(nodes, "2+2", *apart) as deployment:
        wait_until(lambda: nodes.pid("decode-1") is not None, BACK_S, deployment.log)
        kinds = ("pool", "prefill", "decode")
        homes = [{nodes.home(f"{kind}-{number}") for kind in kinds} for number in range(2)]
        assert [len(home) for home in homes] == [1, 1], deployment.log()
        assert homes[0] != homes[1]
        wanted = mixed(16, seed=5, outputs=(20, 90))
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert pulled_by(deployment) == set(), "KV goes by the pool of each node"


@rare
def test_each_pair_has_its_road_by_memory_within_a_node_and_sent_between_nodes() -> None:
    each, apart = {"CPU": 2}, ["--transport", "direct", "--prefill-lends", "never", "--log-level", "debug"]
    apart += ["--max-num-seqs", "4", "--max-model-len", "600", "--kv-memory-mb", "8"]  # the near one is soon full
    with clustered(HEAD, each, each) as nodes, deployed_on(nodes, "1+3", *apart) as deployment:
        decoders = [f"decode-{number}" for number in range(3)]
        wait_until(lambda: all(name in parts_of(deployment) for name in decoders), BACK_S, deployment.log)
        near = {name for name in decoders if nodes.home(name) == nodes.home("prefill-0")}
        assert len(near) == 1
        wanted = [*mixed(4, seed=4), *documents(20, seed=9, prompts=(3, 400), outputs=(100, 160))]
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert pulled_by(deployment) > near, "one by mapped memory, others by what is sent"
        assert deployment.metric("kv_transfers_failed_total") == 0


@rare  # tests/launch/test_placing.py has all of this but Ray's words
def test_without_transfers_from_node_to_node_a_pool_is_where_prompts_are() -> None:
    with clustered(PROMPTS, WITH_POOL) as nodes:
        check_what_is_said(
            nodes,
            ("--topology", "1+1"),
            r"KV does not go from node to node, so one node has to have CPU 2, kv_pool 1, prefill 1, decode 1, or each "
            r"of several workers of both kinds: set `topology: auto` for numbers that fit, or `transport: direct`; "
            r"the cluster's nodes are: \S+ \(CPU 2, kv_pool 1, decode 1\); \S+ \(CPU 2, prefill 2\)",
        )


@rare  # the first test has one pool, fed from another node
def test_pools_on_two_nodes_are_fed_from_a_third() -> None:
    """All KV goes from node to node; a node with a pool and its worker is lost under load."""
    nodes_of = clustered(PROMPTS, WITH_POOL, WITH_POOL)
    tight = ("--max-num-seqs", "4", "--max-model-len", "600", "--kv-memory-mb", "8")  # some have to leave as they grow
    with nodes_of as nodes, deployed_on(nodes, "2+2", *FED, *tight) as deployment:
        homes = {number: nodes.home(f"pool-{number}") for number in range(2)}
        assert homes == {number: nodes.home(f"decode-{number}") for number in range(2)}
        assert {nodes.home(f"prefill-{number}") for number in range(2)} == {nodes.home("router")}
        assert len({*homes.values(), nodes.home("router")}) == 3
        wait_until(lambda: parts_of(deployment).keys() >= {"decode-0", "decode-1"}, BACK_S, deployment.log)
        wanted = [*mixed(4, seed=4), *documents(14, seed=9, prompts=(3, 400), outputs=(100, 160))]
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert pulled_by(deployment) == {"decode-0", "decode-1"}
        assert re.search(r"decode-\d+.* goes to pool-\d+", deployment.whole_log()), (
            "what had to leave waits in the pools"
        )

        def move() -> None:
            nodes.add(WITH_POOL)
            nodes.kill(2)

        wanted = mixed(8, seed=5, outputs=(40, 120))
        check_greedy(wanted, served_while(deployment, wanted, move))


@rare  # test_on_ray.py has ranks on one node
@pytest.mark.parametrize("topology", ["colocated", "1+1"])
def test_the_ranks_of_a_worker_are_on_one_node_and_come_back_together(topology: str) -> None:
    """After a kill of one rank they return on the same node; after the loss of their node, on another one."""
    each = {"CPU": 2, "decode": 1} if topology == "colocated" else SPLIT
    flags = ("--tensor-parallel-size", "2", "--pool-verify-pages")
    ranks = ("decode-0", "decode-0-rank-1")
    with clustered(HEAD, each, each) as nodes, deployed_on(nodes, topology, *flags) as deployment:
        homes = [nodes.home(part) for part in ranks]
        first = homes[0]
        assert first is not None
        assert len({*homes}) == 1
        assert first != nodes.home("router")
        check_greedy(few := mixed(6, seed=6, outputs=(1, 60)), asyncio.run(all_tokens(deployment.url, few)))

        def kill_a_rank() -> None:
            old = [nodes.pid(part) for part in ranks]
            assert old[1] is not None
            os.kill(old[1], signal.SIGKILL)
            wait_until(lambda: not {*old, None} & {nodes.pid(part) for part in ranks}, BACK_S, deployment.log)
            assert {nodes.home(part) for part in ranks} == {first}

        wanted = mixed(6, seed=7, outputs=(40, 120))
        check_greedy(wanted, served_while(deployment, wanted, kill_a_rank))
        # the parts now count as stable: the launcher gives up a part that dies early again and again
        time.sleep(QUICK_DEATH_S)
        wanted = mixed(6, seed=8, outputs=(40, 120))
        check_greedy(wanted, served_while(deployment, wanted, lambda: nodes.kill_home(first)))
        # the prefill worker may have answered all of them, while the ranks are still on their way
        wait_until(lambda: None not in {nodes.home(part) for part in ranks}, BACK_S, deployment.log)
        homes = [nodes.home(part) for part in ranks]
        assert len(set(homes)) == 1
        assert homes[0] not in (first, None, nodes.home("router"))


@rare
def test_ranks_send_to_the_same_ranks_on_another_node() -> None:
    with (
        clustered(HEAD, PROMPTS, WITH_POOL) as nodes,
        deployed_on(nodes, "1+1", *FED, "--tensor-parallel-size", "2") as deployment,
    ):
        assert nodes.home("prefill-0") == nodes.home("prefill-0-rank-1") != nodes.home("decode-0")
        assert nodes.home("decode-0") == nodes.home("decode-0-rank-1") == nodes.home("pool-0")
        wanted = mixed(12, seed=10, outputs=(10, 60))
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert pulled_by(deployment) == {"decode-0"}


def parts_of(deployment: Deployment) -> dict[str, str]:
    """Return the parts that know each other: name -> node."""
    return {part["name"]: part["node"] for part in deployment.ask("/status").json()["parts"]}


def pulled_by(deployment: Deployment) -> set[str]:
    return set(re.findall(r"(decode-\d+).* is pulled from", deployment.whole_log()))


@rare  # the first test shows most of it
def test_colocated_workers_spread_over_nodes_and_a_single_node_is_enough_to_go_on() -> None:
    each = {"CPU": 4, "decode": 1}
    with (
        clustered(HEAD, each, each) as nodes,
        deployed_on(nodes, "2xcolocated", "--set", "ray.place_s=2") as deployment,
    ):
        homes = [nodes.home(f"decode-{number}") for number in range(2)]
        assert len({*homes, nodes.home("router")}) == 3
        wanted = mixed(12, seed=3, outputs=(60, 200))
        check_greedy(wanted, served_while(deployment, wanted, lambda: nodes.kill(2)))
        # The lost worker waits for a node, and says so; then it takes the new node.
        wait_until(lambda: " waits for a node with CPU 1, decode 1 free" in deployment.log(), BACK_S, deployment.log)
        nodes.add(each)
        wait_until(lambda: all(nodes.home(f"decode-{n}") for n in range(2)), BACK_S, deployment.log)
        assert len({nodes.home(f"decode-{number}") for number in range(2)}) == 2


@rare  # tests/launch/test_placing.py has all of this but Ray's words
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--device", "cuda", "--tensor-parallel-size", "4"),  # a GPU for each rank
            r"decode-0 has no place: it needs CPU 4, GPU 4, decode 1; the cluster's nodes are: .*",
        ),
        (("--ray-address", "127.0.0.1:9"), r"there is no Ray cluster at 127.0.0.1:9 \(ray.address\), .*"),
    ],
    ids=["ranks on GPUs", "no cluster"],
)
def test_what_has_no_place_is_said_in_a_line(apart: Nodes, flags: tuple[str, ...], said: str) -> None:
    check_what_is_said(apart, flags, said)


def check_what_is_said(nodes: Nodes, flags: tuple[str, ...], said: str) -> None:
    given = ["--launcher", "ray", "--ray-address", nodes.address, "--port", "0"]
    process = spawn("demo", *given, "--set", "ray.place_s=1", *flags, environment=nodes.environment)
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 2, errors
    assert re.search(rf"^alignedserve: {said}$", errors.decode(), re.MULTILINE), errors.decode()


@rare
def test_a_node_that_does_not_know_rays_token_may_not_join(apart: Nodes) -> None:
    given = ["--launcher", "ray", "--ray-address", apart.address, "--port", "0"]
    soon = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # how often Ray asks Redis
    process = spawn("demo", *given, environment=apart.environment | soon | {"RAY_AUTH_TOKEN": "ab" * 32})
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 2, errors
    said = f"alignedserve: there is no Ray cluster at {apart.address} (ray.address), or its token is not ours "
    assert f"\n{said}" in errors.decode(), errors.decode()
    assert "InvalidAuthToken" in errors.decode()


@pytest.fixture(scope="module")
def apart() -> Iterator[Nodes]:
    with clustered(HEAD, {"CPU": 4, "decode": 1}) as nodes:
        yield nodes
