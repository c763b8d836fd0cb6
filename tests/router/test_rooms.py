"""The decode worker that the router names to a prompt's prefill worker, and which members hear of each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core import Retention, Role
from alignedserve.protocol.commands import Send
from alignedserve.protocol.messages import Member, Members
from alignedserve.protocol.roads import Endpoint
from alignedserve.router.members import MemberList, Recovery
from alignedserve.router.placing.ranking import Rooms
from tests.samples import ROUTER_MEMBER, member


class TestRooms:
    def test_a_worker_that_has_most_room_is_named(self) -> None:
        rooms = Rooms(block_size=4)
        assert rooms.choose(range(3)) == ""
        rooms.tell("decode-0", 10)
        rooms.tell("decode-1", 12)
        assert [rooms.choose(range(3)) for _ in range(4)] == ["decode-1", "decode-1", "decode-0", "decode-1"]

    def test_a_long_request_takes_what_it_holds_at_once(self) -> None:
        assert [Rooms(4, retention=Retention(most)).blocks(1000) for most in (20, 24)] == [6, 7]

    def test_what_it_tells_counts_not_what_was_guessed(self) -> None:
        rooms = Rooms(block_size=4)
        rooms.tell("decode-0", 10)
        rooms.tell("decode-1", 9)
        rooms.choose(range(100))
        rooms.tell("decode-0", 10)
        assert rooms.choose(range(3)) == "decode-0"

    def test_a_worker_that_has_gone_is_not_named(self) -> None:
        rooms = Rooms(block_size=4)
        rooms.tell("decode-0", 10)
        rooms.forget("decode-0")
        assert rooms.choose(range(3)) == ""


@pytest.mark.parametrize("lends", [False, True])
def test_workers_of_two_kinds_with_a_transport_are_told_of_each_other(lends: bool) -> None:
    """A prefill worker that lends itself is to others a decode worker; what it hands on goes to those that do not."""
    roll, prefill = MemberList(ROUTER_MEMBER), member("prefill-0")
    if lends:
        prefill = replace(prefill, role=Role.DECODE, lends=True)
    with_one = [replace(worker, transport="there") for worker in (prefill, member("decode-0"))]
    for command in (*with_one, member("prefill-1"), member("decode-1")):
        roll.add(command)
    told: dict[str, Any] = {command.to: command.message for command in roll.announce_all() if isinstance(command, Send)}

    def peers(of: str) -> list[str]:
        members = told[of]
        assert isinstance(members, Members)
        workers = [member.name for member in members.members if member.role in (Role.PREFILL, Role.DECODE)]
        return sorted(name for name in workers if name != of)

    assert {name: peers(name) for name in told if name != "router"} == {
        "prefill-0": ["decode-0"],
        "decode-0": ["prefill-0"],
        "prefill-1": [],
        "decode-1": [],
    }
    news = [command.to for command in roll.announce_change(with_one[0]) if isinstance(command, Send)]
    assert sorted(news) == ["decode-0", "prefill-0"]


def test_workers_without_a_road_are_not_told_of_each_other() -> None:
    """One prefill worker's GPU reads the memory of the decode worker's, another's does not."""
    roll = MemberList(ROUTER_MEMBER)
    near, far, decode = (
        replace(member(name), transport=Endpoint("10.0.0.1:1", device, frozenset(reached)).pack())
        for name, device, reached in (("prefill-0", "a", "c"), ("prefill-1", "b", ""), ("decode-0", "c", "ab"))
    )
    for worker in (near, far, decode):
        roll.add(worker)
    told: dict[str, Any] = {command.to: command.message for command in roll.announce_all() if isinstance(command, Send)}
    known = {name: {known.name for known in members.members} for name, members in told.items()}
    assert known["decode-0"] >= {"prefill-0"}
    assert "prefill-1" not in known["decode-0"]
    assert "decode-0" in known["prefill-0"]
    assert "decode-0" not in known["prefill-1"]


def test_a_pool_and_workers_know_each_other_on_one_node_only() -> None:
    roll = MemberList(ROUTER_MEMBER)
    of_nodes = {
        number: [
            replace(member(f"{role}-{number}"), node=f"n{number}", transport="there") for role in ("pool", "decode")
        ]
        for number in range(2)
    }
    prefill = replace(member("prefill-0"), node="n2", transport="there")
    for worker in (*of_nodes[0], *of_nodes[1], prefill):
        roll.add(worker)

    def told(of: Member) -> set[str]:
        sent = roll.roll_for(of)
        assert isinstance(sent, Send)
        assert isinstance(sent.message, Members)
        return {member.name for member in sent.message.members} - {"router", of.name}

    for pool, decode in of_nodes.values():
        assert told(pool) == {decode.name}
        assert told(decode) == {pool.name, prefill.name}
    assert told(prefill) == {"decode-0", "decode-1"}


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_that_claim_a_request_the_one_that_it_was_handed_on_to_has_it(first: int) -> None:
    """Until the sender of its KV hears of the end of the transfer, both do, to a router that has just started."""
    claims = [replace(member("prefill-0"), role=Role.DECODE, lends=True), member("decode-0")]
    recovery = Recovery(0.0)
    for claiming in (claims[first], claims[1 - first]):
        recovery.hold(("a", 0), claiming)
    assert recovery.holder(("a", 0)) == claims[1]
