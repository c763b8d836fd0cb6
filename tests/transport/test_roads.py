"""Tests of the road between two workers, as they and the router read it from what they registered."""

from __future__ import annotations

import pytest

from alignedserve.core import Role
from alignedserve.protocol.messages import Member
from alignedserve.protocol.roads import Endpoint, Road, endpoints, road_between

ON_0 = Endpoint("10.0.0.1:4000", "gpu-0", frozenset({"gpu-1", "gpu-2"}))
ON_1 = Endpoint("10.0.0.1:4001", "gpu-1", frozenset({"gpu-0"}))
ON_2 = Endpoint("10.0.0.1:4002", "gpu-2")
BOTH_2 = ON_2._replace(also_sends=True)
ON_CPU, ANYWHERE = Endpoint("10.0.0.1:4003", "cpu"), Endpoint("10.0.0.1:4004")


def worker(role: Role, *ends: Endpoint, node: str = "a") -> Member:
    return Member(f"{role.value}-0", role, node, 1, "tcp://10.0.0.1:1", " ".join(end.pack() for end in ends))


@pytest.mark.parametrize(
    ("one", "other", "road"),
    [
        ([ON_0], [ON_0], Road.IPC),
        ([ON_0], [ON_1], Road.IPC),
        ([ON_0], [ON_2], Road.HOST),  # one reads the other's memory, and not the other way
        ([ON_1], [ON_2], Road.HOST),
        ([ON_CPU], [ON_CPU], Road.IPC),
        ([ANYWHERE], [ANYWHERE], Road.COLLECTIVE),
        ([ANYWHERE], [ON_CPU], Road.HOST),
        ([], [ON_0], Road.HOST),
        ([], [], Road.HOST),
        ([ON_0], [BOTH_2], Road.HOST),  # one reads both ways, and only one sends
        ([BOTH_2], [BOTH_2._replace(device="gpu-3")], Road.COLLECTIVE),
        ([BOTH_2], [ANYWHERE], Road.COLLECTIVE),
        ([ON_0, ON_1], [ON_1, ON_0], Road.IPC),
        ([ON_0, ON_1], [ON_1, ON_2], Road.HOST),  # a rank that has no road
        ([ON_0, ON_1], [ON_0], Road.HOST),
        ([ANYWHERE, ANYWHERE], [ANYWHERE, ANYWHERE], Road.COLLECTIVE),
    ],
)
def test_the_road_of_a_pair(one: list[Endpoint], other: list[Endpoint], road: Road) -> None:
    pair = worker(Role.PREFILL, *one), worker(Role.DECODE, *other)
    assert road_between(*pair) is road_between(*pair[::-1]) is road


def test_memory_is_read_within_a_node_alone() -> None:
    """UUIDs tell GPUs of several nodes apart, but every node has a "cpu"."""
    for end in (ON_CPU, ON_0):
        assert road_between(worker(Role.PREFILL, end), worker(Role.DECODE, end, node="b")) is Road.HOST
    both = ON_CPU._replace(also_sends=True)
    assert road_between(worker(Role.PREFILL, both), worker(Role.DECODE, both, node="b")) is Road.COLLECTIVE
    assert road_between(worker(Role.PREFILL, both), worker(Role.DECODE, both)) is Road.IPC
    apart = worker(Role.PREFILL, ANYWHERE), worker(Role.DECODE, ANYWHERE, node="b")
    assert road_between(*apart) is Road.COLLECTIVE


@pytest.mark.parametrize("end", [ON_0, ON_2, BOTH_2, ON_CPU, ANYWHERE, Endpoint("[::1]:4000", "cpu")])
def test_what_a_worker_registers_is_read(end: Endpoint) -> None:
    assert Endpoint.read(end.pack()) == end
    assert endpoints(worker(Role.DECODE, end, ON_1)) == [end, ON_1]
