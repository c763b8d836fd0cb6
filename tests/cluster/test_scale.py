"""`alignedserve scale` on a cluster: what is added to a pool is beside it."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import clustered, deployed_on
from tests.conftest import SOAK
from tests.end_to_end.client import check_greedy, mixed
from tests.end_to_end.deployment import wait_until
from tests.end_to_end.test_scale import AGAIN_S, parts, serve_while


@pytest.mark.skipif(not SOAK, reason="the launcher for processes shows most of it: `make soak` has it")
def test_workers_come_and_go_beside_their_pool() -> None:
    """On nodes that name no roles."""
    with (
        clustered({"CPU": 0}, {"CPU": 6}) as nodes,
        deployed_on(nodes, "1+1", "--profile-s", "0") as deployment,
    ):
        assert serve_while(deployment, mixed(2, seed=31), "scale", "--prefill", "2", "--decode", "2")
        wait_until(lambda: parts(deployment) >= {"prefill-1", "decode-1"}, AGAIN_S, deployment.log)
        assert {nodes.home(part) for part in ("prefill-1", "decode-1")} == {nodes.home("pool-0")}
        wanted = mixed(12, seed=32, outputs=(30, 80))
        check_greedy(wanted, serve_while(deployment, wanted, "scale", "--prefill", "1", "--decode", "1"))
        assert not parts(deployment) & {"prefill-1", "decode-1"}
