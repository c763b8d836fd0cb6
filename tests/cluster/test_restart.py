"""Tests of `alignedserve restart` on a cluster: where a spare has room, and what is said where it has none."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import clustered, deployed_on
from tests.end_to_end.client import command
from tests.end_to_end.test_restart import DRAIN, parts_of, restart, under_load
from tests.rare import rare

HEAD = {"CPU": 0}


@rare
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_part_is_replaced_under_load_where_one_worker_more_has_room(ranks: int) -> None:
    """A second restart needs no more room: a spare gets the place of the worker that went before it."""
    flags = ("--tensor-parallel-size", str(ranks), *DRAIN)
    with clustered(HEAD, {"CPU": 3 * ranks}) as nodes, deployed_on(nodes, "1+1", *flags) as deployment:
        before = parts_of(nodes.processes())
        assert len(before) == 4 + 2 * ranks
        for _ in range(2):
            under_load(deployment, lambda: restart(deployment))
            after = parts_of(nodes.processes())
            assert len(after) == len(before)
            assert not before.keys() & after.keys()
            before = after


@rare
def test_without_room_for_a_spare_it_says_so_and_workers_are_replaced_in_place() -> None:
    """What was reserved for the spare is free again: it has room as soon as a node comes."""
    node = {"CPU": 3, "decode": 1}
    flags = ("--tensor-parallel-size", "2", *DRAIN)
    with clustered(HEAD, node) as nodes, deployed_on(nodes, "colocated", *flags) as deployment:
        said = command("restart", "--port", str(deployment.port))
        assert said.returncode == 2
        assert (
            "decode-0 is not replaced: pool-1, decode-1, decode-1-rank-1 wait for a node with CPU 2, decode"
            in said.stderr
        )
        assert said.stderr.endswith("; --in-place ends a worker before the next one starts\n")
        under_load(deployment, lambda: restart(deployment, "--in-place"))
        nodes.add(node)
        restart(deployment)
