"""Membership derived from frames: which members are there, which frames are missing, and when a core may hear it."""

from __future__ import annotations

import pytest

from alignedserve.errors import CastOut
from alignedserve.protocol.events import LinkGap, MemberJoined, MemberLost, Received
from alignedserve.protocol.membership import MOST_HELD, UNNUMBERED, Heard, Membership
from alignedserve.protocol.messages import ROUTER, AskPages, Member
from alignedserve.protocol.wire import Envelope
from tests.samples import POOL_MEMBER, ROUTER_MEMBER, member

ASK = AskPages(1)


def frame(number: int, incarnation: int = 1) -> Envelope:
    return Envelope("decode-0", incarnation, number, ASK)


def received(incarnation: int = 1) -> Received:
    return Received("decode-0", ASK, incarnation)


@pytest.fixture
def members() -> Membership:
    """Return what the pool knows of members: so far only itself."""
    members = Membership("pool-0", 1)
    assert members.announced((POOL_MEMBER,)) == [MemberJoined(POOL_MEMBER)]
    return members


def test_a_new_incarnation_is_a_loss_and_a_new_member(members: Membership) -> None:
    first, second, gateway = member("decode-0", 1), member("decode-0", 2), member("gateway-0")
    assert members.announced((POOL_MEMBER, gateway, first)) == [MemberJoined(gateway), MemberJoined(first)]
    assert members.announced((POOL_MEMBER, gateway, first)) == []
    assert members.announced((POOL_MEMBER, gateway, second)) == [MemberLost(first), MemberJoined(second)]
    assert members.announced((POOL_MEMBER, second)) == [MemberLost(gateway)]


def test_a_frame_that_overtook_its_senders_announcement_waits_for_it(members: Membership) -> None:
    members.announced((POOL_MEMBER, member("decode-0", 1)))
    assert members.admits(received(1))
    assert not members.admits(received(2))
    lost, joined = MemberLost(member("decode-0", 1)), MemberJoined(member("decode-0", 2))
    assert members.announced((POOL_MEMBER, member("decode-0", 2))) == [lost, joined, received(2)]
    assert members.admits(received(2))


def test_a_frame_of_a_lost_member_is_never_heard(members: Membership) -> None:
    members.announced((POOL_MEMBER, member("decode-0", 1)))
    members.announced((POOL_MEMBER,))
    assert not members.admits(received(1))
    assert members.announced((POOL_MEMBER, member("decode-0", 2))) == [MemberJoined(member("decode-0", 2))]


def test_the_router_hears_and_is_heard_at_once(members: Membership) -> None:
    assert Membership(ROUTER, 1).admits(received())
    assert members.admits(Received(ROUTER, ASK, ROUTER_MEMBER.incarnation))


@pytest.mark.parametrize(
    "announced",
    [(), (member("decode-0"),), (member("pool-0", 2),), (member("pool-1"), member("decode-0"))],
    ids=["nobody", "others", "another life of it", "another of its kind"],
)
def test_a_member_that_is_not_named_was_cast_out(members: Membership, announced: tuple[Member, ...]) -> None:
    with pytest.raises(CastOut, match="the router took pool-0 for dead"):
        members.announced(announced)


def test_what_waits_is_bounded_and_what_is_left_out_is_a_gap(members: Membership) -> None:
    for _ in range(MOST_HELD + 5):
        members.admits(received())
    events = members.announced((POOL_MEMBER, member("decode-0")))
    assert (len(events), events[-1]) == (1 + MOST_HELD + 1, LinkGap("decode-0"))


def test_a_number_that_is_left_out_is_a_gap() -> None:
    heard = Heard()
    assert heard.events(frame(1)) == [received()]
    assert heard.events(frame(2)) == [received()]
    assert heard.events(frame(4)) == [LinkGap("decode-0"), received()]
    assert heard.events(frame(5)) == [received()]
    assert heard.events(frame(UNNUMBERED)) == [received()]


def test_a_frame_that_comes_twice_or_late_is_heard_once_or_not_at_all() -> None:
    heard = Heard()
    assert heard.events(frame(1)) == [received()]
    assert heard.events(frame(1)) == []
    assert heard.events(frame(3)) == [LinkGap("decode-0"), received()]
    assert heard.events(frame(2)) == []
    assert heard.events(frame(4)) == [received()]


def test_frames_of_an_earlier_life_are_dropped() -> None:
    heard = Heard()
    assert heard.events(frame(1, incarnation=2)) == [received(2)]
    assert heard.events(frame(1, incarnation=1)) == []
