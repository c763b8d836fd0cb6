"""Members: which are there, which hear of each other, and what is lost with a member."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import WORKERS, Role
from alignedserve.protocol.commands import Send, SetTimer
from alignedserve.protocol.events import LinkGap, TimerFired
from alignedserve.protocol.figures import WorkerLoad
from alignedserve.protocol.messages import (
    AttemptLost,
    Died,
    Figures,
    Holding,
    Inquire,
    Member,
    Members,
    Message,
    Missed,
    Progress,
    Submit,
)
from alignedserve.protocol.roads import Endpoint
from alignedserve.router.members import MemberList, Recovery
from alignedserve.router.sizing import LOOK_S
from alignedserve.router.state import REFRESH_S, RouterCore
from tests.router.routers import (
    GATHERED_AT,
    HOLDERS,
    LIMITS,
    NAMES,
    REBUILT,
    RECOVERED_AT,
    A,
    announcement,
    beat,
    cancels,
    inquiry,
    look,
    lost_to_owner,
    roll,
    sent,
    serving,
    submit,
)
from tests.samples import ROUTER_MEMBER, member, said


class TestMembers:
    def test_nobody_is_announced_before_everybody_is_gathered(self) -> None:
        """Members that the first announcement does not name would be taken for lost by all others."""
        router = RouterCore(ROUTER_MEMBER, LIMITS, 0.0)
        assert router.start() == [
            SetTimer("gathered", GATHERED_AT),
            SetTimer("liveness", 0.5),
            SetTimer("refresh", REFRESH_S),
            SetTimer("look", LOOK_S),
        ]
        assert router.handle(said("decode-0", beat("decode-0")), 0.1) == []
        assert router.handle(said("gateway-0", beat("gateway-0")), 0.2) == []
        assert router.handle(said("decode-0", Missed()), 0.3) == []
        assert router.handle(LinkGap("decode-0"), 0.4) == [Send("decode-0", Missed())]
        assert router.handle(TimerFired("gathered"), GATHERED_AT) == [
            *announcement(("gateway-0", 1), ("decode-0", 1)),
            SetTimer("recovered", RECOVERED_AT),
        ]

    def test_a_new_member_is_announced_once(self) -> None:
        router = serving(("gateway-0",))
        assert router.handle(said("decode-0", beat("decode-0")), 3.0) == announcement(("gateway-0", 1), ("decode-0", 1))
        assert router.handle(said("decode-0", beat("decode-0")), 3.5) == []

    def test_a_later_life_takes_the_place_of_the_earlier(self) -> None:
        router = serving(("decode-0",))
        assert router.handle(said("decode-0", beat("decode-0", 2)), 3.0) == announcement(("decode-0", 2))
        assert router.handle(said("decode-0", beat("decode-0", 1)), 3.1) == []
        assert router.handle(said("launcher", Died("decode-0", 1)), 3.2) == []

    def test_a_silent_member_is_dead(self) -> None:
        router = serving(("gateway-0", "decode-0"))
        router.handle(said("gateway-0", beat("gateway-0")), 2.9)
        assert look(router, 0.5, 3.0) == [SetTimer("liveness", 3.5)]
        assert look(router, 3.5, 3.5) == [*announcement(("gateway-0", 1)), SetTimer("liveness", 4.0)]

    def test_a_router_that_stood_still_takes_nobody_for_silent(self) -> None:
        """The timer fires before the core has read the messages that came meanwhile."""
        router = serving(("gateway-0", "decode-0"))
        for name in ("gateway-0", "decode-0"):
            router.handle(said(name, beat(name)), 2.9)
        look(router, 0.5, 3.0)
        assert look(router, 11.0, 11.0) == [SetTimer("liveness", 11.5)]
        router.handle(said("gateway-0", beat("gateway-0")), 11.1)
        assert look(router, 11.5, 13.0) == [SetTimer("liveness", 13.5)]
        assert look(router, 13.5, 13.5) == [*announcement(("gateway-0", 1)), SetTimer("liveness", 14.0)]

    def test_everybody_is_announced_again_now_and_then(self) -> None:
        """An announcement that was lost with the last frame on its link would be missed for ever."""
        router = serving(("gateway-0", "decode-0"))
        assert router.handle(TimerFired("refresh"), 5.0) == [
            *announcement(("gateway-0", 1), ("decode-0", 1)),
            SetTimer("refresh", 5.0 + REFRESH_S),
        ]

    @pytest.mark.parametrize("seen", [True, False], ids=["its launcher said so", "it was silent"])
    def test_a_member_that_was_declared_dead_hears_that_it_was(self, seen: bool) -> None:
        """The member was only frozen: its requests have been given to others, and it must not go on with them."""
        router = serving(("gateway-0", "decode-0"))
        router.handle(said("gateway-0", beat("gateway-0")), 3.0)
        if seen:
            router.handle(said("launcher", Died("decode-0", 1)), 3.2)
        else:
            look(router, 0.5, 3.5)
        told = Send("decode-0", roll("decode-0", ("gateway-0", 1)))
        assert router.handle(said("decode-0", beat("decode-0", 1)), 3.3) == [told]
        assert router.handle(said("decode-0", beat("decode-0", 1)), 3.8) == [told]
        assert router.handle(said("decode-0", beat("decode-0", 2)), 4.0) == announcement(
            ("gateway-0", 1), ("decode-0", 2)
        )

    def test_a_member_that_was_declared_dead_hears_so_once_everybody_is_gathered(self) -> None:
        """The next life, if it is here already, hears it as well: it would take missing members for lost."""
        router = RouterCore(ROUTER_MEMBER, LIMITS, 0.0)
        router.handle(said("launcher", Died("decode-0", 1)), 0.1)
        router.handle(said("decode-0", beat("decode-0", 2)), 0.2)
        assert router.handle(said("decode-0", beat("decode-0", 1)), 0.3) == []

    def test_a_loss_is_announced_before_what_was_lost_with_it(self, router: RouterCore) -> None:
        """The next attempt must not reach a member that still counts on the lost member."""
        submit(router, "a")
        gone = router.handle(said("launcher", Died("prefill-0", 1)), 3.1)
        left = [(name, 1) for name in NAMES if name != "prefill-0"]
        holders = [name for name in HOLDERS if name != "prefill-0"]
        told = announcement(*left, to=("gateway-0", "pool-0"))
        assert gone == [*told, *cancels("a", at=holders), lost_to_owner("a", died=True, alone=True)]

    def test_what_an_earlier_life_has_sent_does_not_count(self, router: RouterCore) -> None:
        """Its requests were given up with it: their next attempts may be anywhere."""
        router.handle(said("decode-0", beat("decode-0", 2)), 3.0)
        submit(router, "a")
        for late in (Progress(ended=(("a", 0),)), Progress(lost=(("a", 0),)), Holding((("a", 0),))):
            assert router.handle(said("decode-0", late, incarnation=1), 3.1) == []
        assert router.held["requests"] == 1
        died = said("launcher", Died("prefill-0", 1))
        assert lost_to_owner("a", died=True, alone=True) in router.handle(died, 3.2), "it is still there"

    def test_a_next_life_is_announced_before_what_was_lost_with_the_last(self, router: RouterCore) -> None:
        submit(router, "a")
        again = router.handle(said("prefill-0", beat("prefill-0", 2)), 3.1)
        lives = [(name, 2 if name == "prefill-0" else 1) for name in NAMES]
        told = announcement(*lives, to=("gateway-0", "pool-0", "prefill-0"))
        assert again == [*told, *cancels("a"), lost_to_owner("a", died=True, alone=True)]

    def test_a_new_gateway_is_news_to_workers_and_a_new_worker_is_not(self) -> None:
        router = serving(("gateway-0", "decode-0", "decode-1"))
        there = [("gateway-0", 1), ("decode-0", 1), ("decode-1", 1)]
        there += [("decode-2", 1)]
        came = router.handle(said("decode-2", beat("decode-2")), 3.0)
        assert came == announcement(*there, to=("gateway-0", "decode-2"))
        there += [("gateway-1", 1)]
        load = Figures(worker=WorkerLoad(), member="decode-2")
        for figures in (load, Figures(member="decode-1")):
            assert router.handle(said(figures.member, figures), 3.0) == [Send("gateway-0", figures)]
        came = router.handle(said("gateway-1", beat("gateway-1")), 3.1)
        told = announcement(*there, to=("gateway-0", "decode-0", "decode-1", "decode-2", "gateway-1"))
        assert came == [*told, replace(REBUILT, to="gateway-1"), Send("gateway-1", load)]


class TestLostMembers:
    @pytest.mark.parametrize(
        ("stage", "holder"),
        [
            (None, "prefill-0"),
            (("pool-0", Progress(committed=(("a", 0),))), "pool-0"),
            (("decode-0", Progress(joined=(("a", 0),))), "decode-0"),
        ],
    )
    def test_what_a_lost_member_had_starts_again(
        self, router: RouterCore, stage: tuple[str, Message] | None, holder: str
    ) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        if stage is not None:
            router.handle(said(*stage), 3.1)
        for name in ("prefill-0", "pool-0", "decode-0"):
            if name != holder:
                lost = router.handle(said(name, beat(name, 2)), 3.2)
                assert not sent(lost, AttemptLost)
        lost = router.handle(said("launcher", Died(holder, 1)), 3.3)
        is_worker = holder != "pool-0"
        assert lost_to_owner("a", died=is_worker, alone=is_worker) in lost

    def test_what_a_lost_owner_opened_ends(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        assert router.handle(said("launcher", Died("gateway-0", 1)), 3.1)[-len(HOLDERS) :] == cancels("a")
        assert router.held["requests"] == 0

    @pytest.mark.parametrize("life", [1, 2])
    def test_of_what_a_lost_worker_said_last_only_what_had_joined_it_counts(
        self, router: RouterCore, life: int
    ) -> None:
        """The pool has put it back. If it were counted at the dead worker, no later loss would include it: so its
        attempt is lost with that worker, and with no other."""
        router.handle(said("gateway-0", Submit(A)), 3.0)
        router.handle(said("pool-0", Progress(committed=(("a", 0),))), 3.1)
        router.handle(said("launcher", Died("decode-0", 1)), 3.2)
        joined = router.handle(said("decode-0", Progress(joined=(("a", 0),)), life), 3.3)
        holders = [name for name in HOLDERS if name != "decode-0"]
        assert joined == ([*cancels("a", at=holders), lost_to_owner("a", died=True)] if life == 1 else [])
        assert router.handle(said("decode-0", Progress(committed=(("a", 0),)), life), 3.4) == []

    def test_a_commit_that_was_lost_with_the_pool_is_a_lost_attempt(self, router: RouterCore) -> None:
        """The pool died before it told the router of the commit, or before it got the commit."""
        submit(router, "a", "b")
        left = [(name, 1) for name in NAMES if name != "pool-0"]
        assert router.handle(said("launcher", Died("pool-0", 1)), 3.1) == [
            *announcement(*left),
            inquiry("prefill-0", "a"),
            inquiry("prefill-1", "b"),
        ]
        holders = [name for name in HOLDERS if name != "pool-0"]
        unknown = said("prefill-0", Progress(unknown=(("a", 0),)))
        assert router.handle(unknown, 3.2) == [*cancels("a", at=holders), lost_to_owner("a")]
        assert router.held["requests"] == 1, "the other one is where it was"

    def test_with_the_pool_nothing_is_lost_that_has_left_it(self, router: RouterCore) -> None:
        submit(router, "a", "b")
        router.handle(said("pool-0", Progress(committed=(("a", 0), ("b", 0)))), 3.1)
        router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.2)
        gone = router.handle(said("launcher", Died("pool-0", 1)), 3.3)
        assert lost_to_owner("b") in gone
        assert lost_to_owner("a") not in gone
        assert not sent(gone, Inquire)


@pytest.mark.parametrize("lends", [False, True])
def test_workers_of_two_kinds_with_a_transport_are_told_of_each_other(lends: bool) -> None:
    """A prefill worker that lends itself is to others a decode worker; what it hands on goes to those that do not."""
    roll, prefill = MemberList(ROUTER_MEMBER), member("prefill-0")
    if lends:
        prefill = replace(prefill, role=Role.DECODE, lends=True)
    with_one = [replace(worker, transport="there") for worker in (prefill, member("decode-0"))]
    for command in (*with_one, member("prefill-1"), member("decode-1")):
        roll.add(command)
    told = dict(sent(roll.announce_all(), Members))

    def peers(of: str) -> list[str]:
        workers = [member.name for member in told[of].members if member.role in WORKERS]
        return sorted(name for name in workers if name != of)

    assert {name: peers(name) for name in told if name != "router"} == {
        "prefill-0": ["decode-0"],
        "decode-0": ["prefill-0"],
        "prefill-1": [],
        "decode-1": [],
    }
    news = sent(roll.announce_change(with_one[0]), Members)
    assert sorted(name for name, _ in news) == ["decode-0", "prefill-0"]


def test_workers_without_a_road_are_not_told_of_each_other() -> None:
    """One prefill worker's GPU reads the memory of the decode worker's, another's does not."""
    roll = MemberList(ROUTER_MEMBER)
    near, far, decode = (
        replace(member(name), transport=Endpoint("10.0.0.1:1", device, frozenset(reached)).pack())
        for name, device, reached in (("prefill-0", "a", "c"), ("prefill-1", "b", ""), ("decode-0", "c", "ab"))
    )
    for worker in (near, far, decode):
        roll.add(worker)
    told = dict(sent(roll.announce_all(), Members))
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
        [(_, members)] = sent([roll.roll_for(of)], Members)
        return {member.name for member in members.members} - {"router", of.name}

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
