"""Tests on several nodes: what runs where, a node that is lost, a node that is added."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from alignedserve.launch.keeper import QUICK_DEATH_S
from tests.cluster.conftest import Nodes, clustered, deployed_on
from tests.conftest import SOAK
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

HEAD = {"CPU": 0}
SOON_S = 45.0  # sooner than any call to Ray gives up
SPLIT = {"CPU": 4, "kv_pool": 1, "prefill": 1, "decode": 1}


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


@pytest.mark.skipif(not SOAK, reason="the test below shows most of it: `make soak` has it")
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


def test_pools_on_two_nodes_are_fed_from_a_third() -> None:
    """All KV goes from node to node; a node with a pool and its worker is lost under load."""
    with_pool, prompts = {"CPU": 2, "kv_pool": 1, "decode": 1}, {"CPU": 2, "prefill": 2}
    flags = "--transport collective --pool-verify-pages --set wire.transfer_timeout_s=3 --max-num-seqs 4".split()
    flags += ["--set", "schedule.helps=false"]  # prefill workers run prompts alone, and hand all on
    flags += ["--log-level", "debug"]
    with clustered(prompts, with_pool, with_pool) as nodes, deployed_on(nodes, "2+2", *flags) as deployment:
        homes = {number: nodes.home(f"pool-{number}") for number in range(2)}
        assert homes == {number: nodes.home(f"decode-{number}") for number in range(2)}
        assert {nodes.home(f"prefill-{number}") for number in range(2)} == {nodes.home("router")}
        assert len({*homes.values(), nodes.home("router")}) == 3
        wait_until(lambda: parts_of(deployment).keys() >= {"decode-0", "decode-1"}, BACK_S, deployment.log)
        wanted = [*mixed(4, seed=4), *documents(14, seed=9, prompts=(3, 400), outputs=(100, 160))]
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert pulled_by(deployment) == {"decode-0", "decode-1"}
        assert re.search(r"decode-\d+.* goes to pool-\d+", deployment.whole_log()), "documents wait in the pools"

        def move() -> None:
            nodes.add(with_pool)
            nodes.kill(2)

        wanted = mixed(8, seed=5, outputs=(40, 120))
        check_greedy(wanted, served_while(deployment, wanted, move))


@pytest.mark.skipif(not SOAK, reason="a minute; test_ranks.py has ranks on Ray on one node: `make soak` has it")
@pytest.mark.parametrize("topology", ["colocated", "1+1"])
def test_the_ranks_of_a_worker_are_on_one_node_and_come_back_together(topology: str) -> None:
    """After a kill of one rank they return on the same node; after the loss of their node (`make soak`), on another
    one."""
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
        if not SOAK:
            return
        # the parts now count as stable: the launcher gives up a part that dies early again and again
        time.sleep(QUICK_DEATH_S)
        wanted = mixed(6, seed=8, outputs=(40, 120))
        check_greedy(wanted, served_while(deployment, wanted, lambda: nodes.kill_home(first)))
        homes = [nodes.home(part) for part in ranks]
        assert len(set(homes)) == 1
        assert homes[0] not in (first, None, nodes.home("router"))


@pytest.mark.skipif(not SOAK, reason="half a minute: `make soak` has it")
def test_ranks_send_to_the_same_ranks_on_another_node() -> None:
    prompts, decodes = {"CPU": 2, "prefill": 1}, {"CPU": 2, "kv_pool": 1, "decode": 1}
    flags = "--transport collective --pool-verify-pages --tensor-parallel-size 2 --log-level debug".split()
    flags += ["--set", "schedule.helps=false"]
    with clustered(HEAD, prompts, decodes) as nodes, deployed_on(nodes, "1+1", *flags) as deployment:
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


@pytest.mark.skipif(not SOAK, reason="half a minute, of which the test above shows most: `make soak` has it")
def test_colocated_workers_spread_over_nodes_and_a_single_node_is_enough_to_go_on() -> None:
    each = {"CPU": 4, "decode": 1}
    with clustered(HEAD, each, each) as nodes, deployed_on(nodes, "2xcolocated", "--ray-place-s", "2") as deployment:
        homes = [nodes.home(f"decode-{number}") for number in range(2)]
        assert len({*homes, nodes.home("router")}) == 3
        wanted = mixed(12, seed=3, outputs=(60, 200))
        check_greedy(wanted, served_while(deployment, wanted, lambda: nodes.kill(2)))
        # The lost worker waits for a node, and says so; then it takes the new node.
        wait_until(lambda: " waits for a node with CPU 1, decode 1 free" in deployment.log(), BACK_S, deployment.log)
        nodes.add(each)
        wait_until(lambda: all(nodes.home(f"decode-{n}") for n in range(2)), BACK_S, deployment.log)
        assert len({nodes.home(f"decode-{number}") for number in range(2)}) == 2


@pytest.mark.parametrize(
    ("topology", "flags", "said"),
    [
        (
            "1+1",
            (),
            r"pool-0, prefill-0, decode-0 share the memory of one node, which has to have CPU 2, kv_pool 1, "
            r"prefill 1, decode 1, or `transport: collective`, by which they may share several; "
            r"the cluster's nodes are: "
            r"\S+ \(CPU 4, decode 1\); "
            r"\S+ \(CPU 4, kv_pool 1, prefill 1\); \S+ \(nothing of use\)",
        ),
        (
            "colocated",
            ("--device", "cuda", "--tensor-parallel-size", "4"),  # a GPU for each rank
            r"decode-0 has no place: it needs CPU 4, GPU 4, decode 1; the cluster's nodes are: .*",
        ),
        ("colocated", ("--ray-address", "127.0.0.1:9"), r"there is no Ray cluster at 127.0.0.1:9 \(ray.address\), .*"),
    ],
    ids=["together", "ranks on GPUs", "no cluster"],
)
def test_what_has_no_place_is_said_in_a_line(apart: Nodes, topology: str, flags: tuple[str, ...], said: str) -> None:
    given = ["--launcher", "ray", "--ray-address", apart.address, "--topology", topology, "--port", "0"]
    process = spawn("demo", *given, "--ray-place-s", "1", *flags, environment=apart.environment)
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 2, errors
    assert re.search(rf"^alignedserve: {said}$", errors.decode(), re.MULTILINE), errors.decode()


def test_a_second_ctrl_c_ends_a_deployment_whose_cluster_hangs(apart: Nodes) -> None:
    """Ray itself would wait for its head for ever; it ends the parts once the head goes on. And before that, its start
    has removed what a killed launcher had left in shared memory."""
    (head,) = (pid for pid, command in apart.processes().items() if "/gcs_server " in command)
    with shared_memory() as memory:
        (left := memory / "alignedserve-1-pool-0.lock").touch()
        where = ("--ray-address", apart.address)
        deployment = Deployment(*where, launcher="ray", memory=memory, environment=apart.environment)
        try:
            assert not left.exists(), deployment.log()
            with held(head):
                deployment.send(signal.SIGINT)
                assert deployment.stop(signal.SIGTERM, within_s=SOON_S) == 0
            assert "alignedserve: the end hangs in " in deployment.log()
            wait_until(lambda: not any(map(part_of, apart.processes().values())), GONE_S, deployment.log)
        finally:
            deployment.kill()
            deployment.forget()


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
    with clustered(HEAD, {"CPU": 4, "decode": 1}, {"CPU": 4, "kv_pool": 1, "prefill": 1}) as nodes:
        yield nodes
