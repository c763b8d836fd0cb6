"""Tests of which parts share a node: partners, pools, and the error where there is no room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.launch.placing import ClusterNode, Group, NoPlace, Placing, waits


def placing(*nodes: Mapping[str, float], gpus: float = 0.0, may_travel: bool = True) -> Placing:
    return Placing([ClusterNode(f"n{number}", total) for number, total in enumerate(nodes)], gpus, may_travel)


def names(role: str, count: int) -> list[str]:
    return [f"{role}-{number}" for number in range(count)]


def parts(groups: Sequence[Group]) -> list[set[str]]:
    return [set(group) for group in groups]


def test_where_one_node_has_room_for_all_they_are_together() -> None:
    groups = placing({"CPU": 2}, {"CPU": 8}).groups(names("prefill", 2), names("decode", 2))
    assert parts(groups) == [{"pool-0", "prefill-0", "prefill-1", "decode-0", "decode-1"}]


def test_colocated_workers_have_a_pool_on_each_node() -> None:
    groups = placing({"CPU": 1}, {"CPU": 1}).groups([], names("decode", 2))
    assert parts(groups) == [{"pool-0", "decode-0"}, {"pool-1", "decode-1"}]


def test_colocated_workers_do_without_pools_where_a_node_may_have_several() -> None:
    node = {"CPU": 1, "kv_pool": 2}
    assert parts(placing(node, node).groups([], names("decode", 2))) == [{"decode-0"}, {"decode-1"}]


@pytest.mark.parametrize(
    ("prefill", "decode", "may_travel", "shares"),
    [
        (4, 4, False, [(2, 2), (2, 2)]),
        (2, 6, False, [(1, 3), (1, 3)]),
        (0, 8, False, [(0, 4), (0, 4)]),
        (0, 6, False, [(0, 3), (0, 3)]),
        (1, 7, True, [(1, 3), (0, 4)]),
        (1, 3, False, [(1, 3)]),
    ],
)
def test_nodes_get_their_share_of_both_kinds(
    prefill: int, decode: int, may_travel: bool, shares: list[tuple[int, int]]
) -> None:
    node = {"CPU": 8, "GPU": 4}
    nodes = placing(node, node, gpus=1, may_travel=may_travel)
    placed = nodes.placed(names("prefill", prefill), names("decode", decode))
    kinds = [[part.partition("-")[0] for part in group] for group, _ in placed]
    found = [(each.count("prefill"), each.count("decode")) for each in kinds]
    assert found == shares
    assert [node.name for _, node in placed] == ["n0", "n1"][: len(shares)]


def test_two_large_copies_take_a_node_each() -> None:
    node = {"CPU": 8, "GPU": 4}
    found = Placing([ClusterNode("n0", node), ClusterNode("n1", node)], 1.0, may_travel=False, ranks=4)
    assert [len(group) for group in found.groups([], names("decode", 2))] == [5, 5]


def test_each_pool_has_its_decode_workers_and_a_partner_beside_it() -> None:
    node = {"CPU": 4, "GPU": 4, "kv_pool": 1}
    groups = placing({"CPU": 1}, node, node, gpus=1).groups(names("prefill", 2), names("decode", 6))
    assert parts(groups) == [
        {"pool-0", "prefill-0", "decode-0", "decode-1", "decode-2"},
        {"pool-1", "prefill-1", "decode-3", "decode-4", "decode-5"},
    ]


def test_prompts_may_be_run_where_there_is_no_pool() -> None:
    serving = {"CPU": 4, "kv_pool": 1, "decode": 2}
    groups = placing(serving, {"CPU": 4, "prefill": 2}).groups(names("prefill", 2), names("decode", 2))
    assert parts(groups) == [{"pool-0", "decode-0", "decode-1"}, {"prefill-0"}, {"prefill-1"}]


def test_two_workers_may_share_a_gpu() -> None:
    groups = placing({"CPU": 4, "GPU": 1}, gpus=0.5).groups(["prefill-0"], ["decode-0"])
    assert [dict(needs) for needs in groups[0].values()] == [{"CPU": 0}, *[{"CPU": 1, "GPU": 0.5}] * 2]
    with pytest.raises(NoPlace, match=r"prefill-0 has no place: it needs CPU 1, GPU 1; .*"):
        placing({"CPU": 4, "GPU": 1}, gpus=1).groups(["prefill-0"], ["decode-0"])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            placing({"CPU": 1, "prefill": 1}, {"CPU": 1, "decode": 1}, may_travel=False),
            r"KV does not go from node to node, so one node has to have CPU 2, prefill 1, decode 1, or .*, or "
            r"`transport: direct`; the cluster's nodes are: n0 \(CPU 1, prefill 1\); n1 \(CPU 1, decode 1\)",
        ),
        (placing({"CPU": 1, "kv_pool": 2}, {"CPU": 1}), r"no node has room for all, .*"),
        (placing({"CPU": 1, "kv_pool": 1}), r"prefill-0 has no place: it needs CPU 1; .*"),
        (placing({"kv_pool": 1}), r"decode-0 has no place: with a pool it needs CPU 1, kv_pool 1; .*"),
    ],
    ids=["KV stays", "two pools", "no prompts", "no decodes"],
)
def test_what_has_no_place_is_said(found: Placing, said: str) -> None:
    with pytest.raises(NoPlace, match=said):
        found.groups(["prefill-0"], ["decode-0"])


def test_what_a_group_waits_for_is_said() -> None:
    group = {"pool-0": {"kv_pool": 1.0}, "decode-0": {"CPU": 1.0}}
    assert waits(group, [ClusterNode("n0", {"CPU": 0.5})]) == (
        "pool-0, decode-0 wait for a node with CPU 1, kv_pool 1 free; free are: n0 (CPU 0.5)"
    )


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "CPU": st.integers(0, 6),
                "kv_pool": st.integers(0, 1),
                "prefill": st.integers(0, 3),
                "decode": st.integers(0, 3),
            }
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_whatever_is_placed_is_placed_once_and_fits(nodes: list[dict[str, int]], prefill: int, decode: int) -> None:
    found = placing(*nodes)
    try:
        groups = found.groups(names("prefill", prefill), names("decode", decode))
    except NoPlace:
        return
    placed = [part for group in groups for part in group]
    assert len(placed) == len(set(placed))
    assert {*names("prefill", prefill), *names("decode", decode)} <= set(placed)
    for group in groups:
        needs = {resource: sum(part.get(resource, 0) for part in group.values()) for resource in nodes[0]}
        assert any(all(node[resource] >= number for resource, number in needs.items()) for node in nodes)
        assert any(part.startswith("decode") for part in group) == any(part.startswith("pool") for part in group)


def test_the_ranks_of_a_worker_are_together() -> None:
    node = {"CPU": 4, "GPU": 4, "kv_pool": 1, "decode": 1, "prefill": 1}
    found = Placing([ClusterNode("n0", node), ClusterNode("n1", node)], 1.0, may_travel=True, ranks=2)
    groups = found.groups(names("prefill", 2), names("decode", 2))
    assert parts(groups) == [
        {f"pool-{n}", *(f"{role}-{n}{rank}" for role in ("prefill", "decode") for rank in ("", "-rank-1"))}
        for n in range(2)
    ]
    assert groups[0]["decode-0"] == {"CPU": 1, "GPU": 1, "decode": 1}
    assert groups[0]["decode-0-rank-1"] == {"CPU": 1, "GPU": 1}, "it is of the one decode worker that the node may have"
    apart = Placing([ClusterNode("n0", {"CPU": 1}), ClusterNode("n1", {"CPU": 1})], 0.0, may_travel=False, ranks=2)
    with pytest.raises(NoPlace, match=r"decode-0 has no place: it needs CPU 2; .*"):
        apart.groups([], names("decode", 1))


def test_nodes_that_may_come_are_counted_in_where_those_that_are_there_have_no_room() -> None:
    head, serving = {"CPU": 0.0}, {"CPU": 4.0, "kv_pool": 1.0, "prefill": 1.0, "decode": 2.0}
    coming = [ClusterNode("one more serving", serving)] * 2
    found = replace(placing(head), may_come=coming)
    (group,) = found.groups(names("prefill", 1), names("decode", 2))
    assert group["decode-0"] == {"CPU": 1.0, "decode": 1.0}, "it asks for the resource of its role"
    assert parts(found.groups(names("prefill", 2), names("decode", 3))) == [
        {"pool-0", "prefill-0", "decode-0", "decode-1"},
        {"pool-1", "prefill-1", "decode-2"},
    ]
    with pytest.raises(NoPlace, match=r"decode-4 has no place: .* n0 \(nothing of use\); one more serving \(CPU 4"):
        found.groups(names("prefill", 2), names("decode", 5))


def test_a_node_that_is_there_is_preferred() -> None:
    """Parts that would fit together on a new node are spread over the nodes that already run."""
    small = {"CPU": 2.0, "kv_pool": 1.0}
    found = replace(placing(small, small), may_come=[ClusterNode("one more large", {"CPU": 8.0, "kv_pool": 1.0})])
    assert len(found.groups(names("prefill", 2), names("decode", 2))) == 2
