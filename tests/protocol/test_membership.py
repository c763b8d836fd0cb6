"""Membership derived from frames: which members are there, which frames are missing, and when a core may hear it."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from alignedserve.core import Role
from alignedserve.errors import CastOut
from alignedserve.protocol.events import LinkGap, MemberJoined, MemberLost, Received
from alignedserve.protocol.membership import MOST_HELD, UNNUMBERED, Heard, Membership, Refusals, membership_of
from alignedserve.protocol.messages import (
    LAUNCHER,
    ROUTER,
    AskPages,
    Died,
    Heartbeat,
    Life,
    Member,
    Members,
    Message,
    Missed,
    Retire,
    Started,
    Submit,
)
from alignedserve.protocol.wire import Envelope
from tests.samples import POOL_MEMBER, ROUTER_MEMBER, member, request

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
    assert membership_of(ROUTER, 1, [LIFE]).admits(received())
    assert members.admits(Received(ROUTER, Missed(), ROUTER_MEMBER.incarnation))


LIFE = Life("decode-0", Role.DECODE, 3)


@pytest.mark.parametrize(
    ("event", "is_heard"),
    [
        (Received("decode-0", Heartbeat(member("decode-0", 3)), 3), True),
        (Received("decode-0", Heartbeat(member("decode-0", 2)), 2), False),  # of an earlier life
        (Received("decode-0", Heartbeat(member("decode-0", 4)), 4), False),  # of a life that was not started
        (Received("decode-0", Heartbeat(member("decode-0", 2)), 3), False),  # of another life than its sender
        (Received("decode-0", Heartbeat(member("decode-1", 3)), 3), False),  # of another member than its sender
        (Received("decode-0", Heartbeat(replace(member("decode-0", 3), role=Role.POOL)), 3), False),
        (Received("decode-1", Heartbeat(member("decode-1", 1)), 1), False),  # of a member that was never started
        (Received("decode-0", ASK, 2), True),  # the core knows whether the life is still there
        (Received("decode-0", ASK, 4), False),
        (Received("decode-0", Died("decode-0", 3), 3), False),
        (Received("decode-0", Started((replace(LIFE, incarnation=9),)), 3), False),
        (Received(LAUNCHER, Died("decode-0", 3)), True),
        (Received(LAUNCHER, Died("decode-0", 4)), False),
        (Received(LAUNCHER, Died("decode-1", 1)), False),
        (Received(LAUNCHER, Retire("decode-0", 4)), False),
        (Received(LAUNCHER, ASK), False),
    ],
)
def test_the_router_hears_only_lives_that_were_started_and_what_they_may_say(event: Received, is_heard: bool) -> None:
    members = membership_of(ROUTER, 1, [LIFE])
    assert members.admits(event) is is_heard
    is_late = event.sender == "decode-0" and event.incarnation < 3
    assert members.refusals.count == (not is_heard and not is_late)


def test_the_router_learns_from_its_launcher_which_lives_there_are() -> None:
    members = membership_of(ROUTER, 1, [LIFE])
    assert not members.admits(Received(LAUNCHER, Started((replace(LIFE, incarnation=5),)))), "not for the core"
    assert not members.admits(Received(LAUNCHER, Started((LIFE,)))), "it comes late, and changes nothing"
    assert members.refusals.count == 0
    assert members.admits(Received("decode-0", Heartbeat(member("decode-0", 5)), 5))


@pytest.mark.parametrize("message", [Died("pool-0", 1), Members(()), Heartbeat(member("decode-0"))])
def test_what_a_member_may_not_say_is_not_heard_and_logged_once(
    members: Membership, caplog: pytest.LogCaptureFixture, message: Message
) -> None:
    logging.getLogger("alignedserve").propagate = True
    forged = Received("decode-0", message, 1)
    assert not members.admits(forged), "it waits, since the sender is not known"
    assert members.announced((POOL_MEMBER, member("decode-0"))) == [MemberJoined(member("decode-0"))]
    assert not members.admits(forged)
    assert members.refusals.count == 2
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "pool-0 drops what 'decode-0' may not say"
    ]


def test_what_is_dropped_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It may have a prompt in it."""
    Refusals("router").note("pool-0", Submit(request("secret")))
    assert [record.getMessage() for record in caplog.records] == ["router drops what 'pool-0' may not say: Submit"]


def test_a_part_that_calls_itself_the_launcher_is_not_heard_and_the_launcher_speaks_for_nobody_else() -> None:
    heard, died = Heard(ROUTER), Died("decode-0", 1)
    assert heard.events(Envelope(LAUNCHER, 0, UNNUMBERED, died)) == []
    assert heard.events(Envelope(LAUNCHER, 0, UNNUMBERED, died), is_launchers=True) == [Received(LAUNCHER, died)]
    assert heard.events(frame(1), is_launchers=True) == []
    assert heard.events(frame(1)) == [received()]


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
    heard = Heard("pool-0")
    assert heard.events(frame(1)) == [received()]
    assert heard.events(frame(2)) == [received()]
    assert heard.events(frame(4)) == [LinkGap("decode-0"), received()]
    assert heard.events(frame(5)) == [received()]
    assert heard.events(frame(UNNUMBERED)) == [received()]


def test_a_frame_that_comes_twice_or_late_is_heard_once_or_not_at_all() -> None:
    heard = Heard("pool-0")
    assert heard.events(frame(1)) == [received()]
    assert heard.events(frame(1)) == []
    assert heard.events(frame(3)) == [LinkGap("decode-0"), received()]
    assert heard.events(frame(2)) == []
    assert heard.events(frame(4)) == [received()]


def test_frames_of_lives_before_the_one_that_was_met_are_dropped() -> None:
    heard = Heard("pool-0")
    assert heard.events(frame(1, incarnation=2)) == [received(2)]
    heard.meet("decode-0", 2)
    heard.meet("decode-0", 1)
    assert heard.events(frame(1, incarnation=1)) == []
    assert heard.events(frame(2, incarnation=2)) == [received(2)], "it goes on counting"


def test_a_forged_life_makes_nobody_deaf_to_the_true_one() -> None:
    heard = Heard("pool-0")
    assert heard.events(frame(1, incarnation=2**62)) == [received(2**62)], "for the membership to refuse"
    assert heard.events(frame(1)) == [received()]
    assert heard.events(frame(2)) == [received()]
