"""Tests of `alignedserve scale` on a cluster: a new worker of a pool runs beside it."""

from __future__ import annotations

import os
import signal

import pytest

from alignedserve.protocol.messages import rank_suffix
from tests.cluster.conftest import clustered, deployed_on, growing
from tests.end_to_end.client import check_greedy, mixed
from tests.end_to_end.deployment import BACK_S, deployed, wait_until
from tests.end_to_end.test_scale import BY_LOAD, come_and_go, parts, serve_while
from tests.rare import rare


@rare  # the launcher for processes shows most of it
@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_come_and_go_beside_their_pool(ranks: int) -> None:
    """The nodes name no roles."""
    with (
        clustered({"CPU": 0}, {"CPU": 4 * ranks}) as nodes,
        deployed_on(nodes, "1+1", "--tensor-parallel-size", str(ranks)) as deployment,
    ):
        assert serve_while(deployment, mixed(2, seed=31), "scale", "--prefill", "2", "--decode", "2")
        wait_until(lambda: parts(deployment) >= {"prefill-1", "decode-1"}, BACK_S, deployment.log)
        assert {nodes.home(part) for part in ("prefill-1", "decode-1")} == {nodes.home("pool-0")}
        wanted = mixed(12, seed=32, outputs=(30, 80))
        check_greedy(wanted, serve_while(deployment, wanted, "scale", "--prefill", "1", "--decode", "1"))
        gone = {"prefill-1", "decode-1"}
        wait_until(lambda: not parts(deployment) & gone, BACK_S, deployment.log)  # on a busy machine gateways hear late
        names = [f"{part}{rank_suffix(rank)}" for part in ("prefill-1", "decode-1") for rank in range(ranks)]
        wait_until(lambda: not any(map(nodes.pid, names)), BACK_S, deployment.log)  # their places are free again


@rare
def test_machines_come_with_the_load_and_go_with_it() -> None:
    """Ray's own autoscaler starts a node for a part without a place, and ends a node that is idle for a while."""
    with growing({"CPU": 1, "decode": 1}, most=2) as nodes:
        where = ("--ray-address", nodes.address, "--ray-cluster-file", str(nodes.config), "--set", "ray.place_s=120")
        with deployed(*where, *BY_LOAD, launcher="ray", environment=nodes.environment) as served:
            assert nodes.count() == 2, "the head, and the first worker's"
            assert "pool-0, decode-0 wait for a node with CPU 1, decode 1 free; free are: " in served.whole_log()
            come_and_go(served, "decode-1")
            assert nodes.home("decode-0") is not None
            wait_until(lambda: nodes.count() == 2, BACK_S, served.log)

            home = nodes.home("decode-0")
            assert home is not None
            os.kill(home, signal.SIGKILL)  # the node is lost, and replaced
            wait_until(lambda: nodes.home("decode-0") not in (home, None), BACK_S, served.log)
            wait_until(lambda: "decode-0" in parts(served), BACK_S, served.log)


@rare
def test_a_decode_worker_on_another_node_has_a_pool_there_and_takes_it_along() -> None:
    with_pool, prompts = {"CPU": 2, "kv_pool": 1, "decode": 1}, {"CPU": 2, "prefill": 2}
    with clustered(prompts, with_pool) as nodes:
        flags = "--transport collective --set wire.transfer_timeout_s=3 --log-level debug".split()
        flags += ["--set", "schedule.helps=false"]  # all requests decode on decode workers
        with deployed_on(nodes, "1+1", *flags) as deployment:
            nodes.add(with_pool)
            assert serve_while(deployment, mixed(2, seed=31), "scale", "--decode", "2")
            wait_until(lambda: parts(deployment) >= {"pool-1", "decode-1"}, BACK_S, deployment.log)
            assert nodes.home("pool-1") == nodes.home("decode-1") != nodes.home("pool-0")
            wanted = mixed(12, seed=32, outputs=(30, 80))
            for workers in ("2", "1"):  # with 2 nothing changes, and both are used; a fast machine retires one at once
                check_greedy(wanted, serve_while(deployment, wanted, "scale", "--decode", workers))
            wait_until(lambda: not parts(deployment) & {"pool-1", "decode-1"}, BACK_S, deployment.log)
            wait_until(lambda: not any(map(nodes.pid, ("pool-1", "decode-1"))), BACK_S, deployment.log)
            assert "decode-1: ended request_id" in deployment.whole_log(), "it was used"
