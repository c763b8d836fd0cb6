"""The router: who is there, where each request is, and what is lost with whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.commands import Command, Send, SetTimer
from alignedserve.core import Role, ServiceClass, Slo
from alignedserve.events import LinkGap, TimerFired
from alignedserve.messages import (
    AttemptLost,
    Backlog,
    Cancel,
    Declare,
    Died,
    Figures,
    Heartbeat,
    Holding,
    Inquire,
    Members,
    Message,
    Missed,
    Prefill,
    Progress,
    Refused,
    Submit,
)
from alignedserve.router.admission import Bound, Queues
from alignedserve.router.recovery import RECOVERY_S, SETTLE_S
from alignedserve.router.sizing import LOOK_S
from alignedserve.router.state import REFRESH_S, RouterCore, RouterLimits
from tests.samples import ROUTER_MEMBER, member, next_attempt, request, said

LIMITS = RouterLimits(most_open=3, heartbeat_s=0.5, death_s=3.0)
GATHERED_AT = 1.0
RECOVERED_AT = GATHERED_AT + RECOVERY_S
NAMES = ("gateway-0", "pool-0", "prefill-0", "prefill-1", "decode-0")
HOLDERS = ("prefill-0", "prefill-1", "pool-0", "decode-0")
A, B = request("a"), request("b")
REBUILT = Send("gateway-0", Figures(rebuilt_s=RECOVERED_AT, member="router"))


def beat(name: str, incarnation: int = 1) -> Message:
    return Heartbeat(member(name, incarnation))


def recovering(names: Sequence[str] = NAMES) -> RouterCore:
    """A router that has gathered these members, and asks who holds what."""
    router = RouterCore(ROUTER_MEMBER, LIMITS, 0.0)
    for name in names:
        assert router.handle(said(name, beat(name)), 0.1) == []
    router.handle(TimerFired("gathered"), GATHERED_AT)
    return router


def serving(names: Sequence[str] = NAMES) -> RouterCore:
    router = recovering(names)
    assert router.handle(TimerFired("recovered"), RECOVERED_AT) == ([REBUILT] if "gateway-0" in names else [])
    return router


@pytest.fixture
def router() -> RouterCore:
    return serving()


def cancels(name: str, attempt: int = 0, at: Sequence[str] = HOLDERS) -> list[Command]:
    return [Send(holder, Cancel(name, attempt)) for holder in at]


KNOWN = {  # in the order in which they are named
    Role.GATEWAY: (Role.POOL, Role.PREFILL, Role.DECODE, Role.GATEWAY),
    Role.POOL: (Role.PREFILL, Role.DECODE),
    Role.PREFILL: (Role.POOL, Role.GATEWAY),
    Role.DECODE: (Role.POOL, Role.GATEWAY),
}


def roll(to: str, *there: tuple[str, int]) -> Members:
    """What one is told where these are there: of those that it has to do with, and of itself."""
    members = [member(*one) for one in there]
    known = [one for role in KNOWN[member(to).role] for one in members if one.role is role and one.name != to]
    return Members((ROUTER_MEMBER, *known, *(one for one in members if one.name == to)))


def announcement(*there: tuple[str, int], to: Sequence[str] | None = None) -> list[Command]:
    names = [name for name, _ in there] if to is None else to
    return [Send(name, roll(name, *there)) for name in names]


def inquiry(holder: str, *names: str, attempt: int = 0) -> Command:
    return Send(holder, Inquire(tuple((name, attempt) for name in names)))


def lost_to_owner(name: str, attempt: int = 0) -> Command:
    return Send("gateway-0", AttemptLost(name, attempt))


def submit(router: RouterCore, *names: str, now: float = 3.0) -> None:
    for name in names:
        router.handle(said("gateway-0", Submit(request(name))), now)


class TestMembers:
    def test_nobody_is_announced_before_everybody_is_gathered(self) -> None:
        """All others would take for lost whom the first announcement does not name."""
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
        router.handle(said("gateway-0", beat("gateway-0")), 3.0)
        assert router.handle(TimerFired("liveness"), 3.05) == [SetTimer("liveness", 3.55)]
        assert router.handle(TimerFired("liveness"), 3.2) == [
            *announcement(("gateway-0", 1)),
            SetTimer("liveness", 3.7),
        ]

    def test_everybody_is_announced_again_now_and_then(self) -> None:
        """An announcement that was lost with the last frame on its link would be missed for ever."""
        router = serving(("gateway-0", "decode-0"))
        assert router.handle(TimerFired("refresh"), 5.0) == [
            *announcement(("gateway-0", 1), ("decode-0", 1)),
            SetTimer("refresh", 5.0 + REFRESH_S),
        ]

    @pytest.mark.parametrize("seen", [True, False], ids=["its launcher said so", "it was silent"])
    def test_who_was_declared_dead_hears_that_it_was(self, seen: bool) -> None:
        """It was only frozen: what it had has been given to others, and it must not go on with it."""
        router = serving(("gateway-0", "decode-0"))
        router.handle(said("gateway-0", beat("gateway-0")), 3.0)
        router.handle(said("launcher", Died("decode-0", 1)) if seen else TimerFired("liveness"), 3.2)
        told = Send("decode-0", roll("decode-0", ("gateway-0", 1)))
        assert router.handle(said("decode-0", beat("decode-0", 1)), 3.3) == [told]
        assert router.handle(said("decode-0", beat("decode-0", 1)), 3.8) == [told]
        assert router.handle(said("decode-0", beat("decode-0", 2)), 4.0) == announcement(
            ("gateway-0", 1), ("decode-0", 2)
        )

    def test_who_was_declared_dead_hears_so_once_everybody_is_gathered(self) -> None:
        """The next life gets it as well, where that is here already: it would take who is missing for lost."""
        router = RouterCore(ROUTER_MEMBER, LIMITS, 0.0)
        router.handle(said("launcher", Died("decode-0", 1)), 0.1)
        router.handle(said("decode-0", beat("decode-0", 2)), 0.2)
        assert router.handle(said("decode-0", beat("decode-0", 1)), 0.3) == []

    def test_a_loss_is_announced_before_what_was_lost_with_it(self, router: RouterCore) -> None:
        """The next attempt must not reach who still counts on the lost member."""
        submit(router, "a")
        gone = router.handle(said("launcher", Died("prefill-0", 1)), 3.1)
        left = [(name, 1) for name in NAMES if name != "prefill-0"]
        holders = [name for name in HOLDERS if name != "prefill-0"]
        told = announcement(*left, to=("gateway-0", "pool-0"))
        assert gone == [*told, *cancels("a", at=holders), lost_to_owner("a")]

    def test_a_next_life_is_announced_before_what_was_lost_with_the_last(self, router: RouterCore) -> None:
        submit(router, "a")
        again = router.handle(said("prefill-0", beat("prefill-0", 2)), 3.1)
        lives = [(name, 2 if name == "prefill-0" else 1) for name in NAMES]
        told = announcement(*lives, to=("gateway-0", "pool-0", "prefill-0"))
        assert again == [*told, *cancels("a"), lost_to_owner("a")]

    def test_a_new_gateway_is_news_to_workers_and_a_new_worker_is_not(self) -> None:
        router = serving(("gateway-0", "decode-0", "decode-1"))
        there = [("gateway-0", 1), ("decode-0", 1), ("decode-1", 1)]
        there += [("decode-2", 1)]
        came = router.handle(said("decode-2", beat("decode-2")), 3.0)
        assert came == announcement(*there, to=("gateway-0", "decode-2"))
        there += [("gateway-1", 1)]
        came = router.handle(said("gateway-1", beat("gateway-1")), 3.1)
        told = announcement(*there, to=("gateway-0", "decode-0", "decode-1", "decode-2", "gateway-1"))
        assert came == [*told, replace(REBUILT, to="gateway-1")]


class TestPlacement:
    def test_the_least_loaded_prefill_worker_gets_the_prompt(self, router: RouterCore) -> None:
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == [Send("prefill-0", Prefill(A))]
        assert router.handle(said("gateway-0", Submit(B)), 3.0) == [Send("prefill-1", Prefill(B))]

    def test_colocated_the_decode_worker_does(self) -> None:
        router = serving(("gateway-0", "decode-0"))
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == [Send("decode-0", Prefill(A))]

    def test_without_a_prefill_worker_a_pool_keeps_prompts_waiting(self) -> None:
        router = serving(("gateway-0", "pool-0", "decode-0"))
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == []
        assert Send("prefill-0", Prefill(A)) in router.handle(said("prefill-0", beat("prefill-0")), 3.1)

    def test_beyond_the_bound_a_request_is_refused_but_a_next_attempt_is_not(self, router: RouterCore) -> None:
        for name in "xyz":
            router.handle(said("gateway-0", Submit(request(name))), 3.0)
        why = "3 requests are open, the limit is 3"
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == [Send("gateway-0", Refused("a", 0, why, 1.0))]
        again = next_attempt(A)
        assert router.handle(said("gateway-0", Submit(again)), 3.0) == [
            *cancels("a"),
            Send("prefill-1", Prefill(again)),
        ]

    def test_a_repeated_or_older_submit_changes_nothing(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(next_attempt(A))), 3.0)
        assert router.handle(said("gateway-0", Submit(next_attempt(A))), 3.0) == []
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == []

    def test_a_dead_owner_submits_nothing(self, router: RouterCore) -> None:
        """Its last frame may come after the news of its death; nobody would ever cancel the request."""
        router.handle(said("launcher", Died("gateway-0", 1)), 3.0)
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == []
        assert router.held["requests"] == 0


class TestRoad:
    def test_a_cancel_reaches_all_that_may_hold_the_request(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        assert router.handle(said("gateway-0", Cancel("a", 0)), 3.0) == cancels("a")
        assert router.handle(said("gateway-0", Cancel("a", 0)), 3.0) == []

    def test_a_cancel_of_an_older_attempt_does_not_touch_the_next(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(next_attempt(A))), 3.0)
        assert router.handle(said("gateway-0", Cancel("a", 0)), 3.0) == []

    def test_ended_requests_are_forgotten(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        assert router.handle(said("decode-0", Progress(ended=(("a", 0),))), 3.1) == []
        assert router.held["requests"] == 0

    def test_an_attempt_that_a_worker_lost_is_lost_to_its_owner(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        lost = Progress(lost=(("a", 0),))
        assert router.handle(said("decode-0", lost), 3.1) == [*cancels("a"), Send("gateway-0", AttemptLost("a", 0))]
        assert router.handle(said("decode-0", lost), 3.2) == []

    @pytest.mark.parametrize(
        ("holder", "progress"),
        [("pool-0", Progress(committed=(("a", 0),))), ("decode-0", Progress(joined=(("a", 0),)))],
    )
    def test_what_nobody_wants_any_more_is_cancelled_where_it_turns_up(
        self, router: RouterCore, holder: str, progress: Progress
    ) -> None:
        """Its Cancel was lost."""
        assert router.handle(said(holder, progress), 3.0) == [Send(holder, Cancel("a", 0))]
        router.handle(said("gateway-0", Submit(next_attempt(A))), 3.1)
        assert router.handle(said(holder, progress), 3.2) == [Send(holder, Cancel("a", 0))], "an older attempt"

    def test_who_had_to_leave_waits_in_the_pool_again(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.1)
        router.handle(said("decode-0", Progress(returned=(("a", 0),))), 3.2)
        assert router.handle(said("decode-0", Progress(unknown=(("a", 0),))), 3.3) == [], "it is elsewhere"
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(said("launcher", Died("pool-0", 1)), 3.4)

    def test_who_had_to_leave_is_lost_without_a_pool(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.1)
        router.handle(said("launcher", Died("pool-0", 1)), 3.2)
        returned = router.handle(said("decode-0", Progress(returned=(("a", 0),))), 3.3)
        assert Send("gateway-0", AttemptLost("a", 0)) in returned

    def test_who_had_to_leave_may_have_joined_elsewhere_before_that_is_heard(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.1)
        router.handle(said("decode-1", beat("decode-1")), 3.1)
        router.handle(said("decode-1", Progress(joined=(("a", 0),))), 3.2)
        router.handle(said("decode-0", Progress(returned=(("a", 0),))), 3.3)
        assert Send("gateway-0", AttemptLost("a", 0)) not in router.handle(said("launcher", Died("pool-0", 1)), 3.4)

    def test_joined_may_be_heard_before_committed(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.1)
        router.handle(said("pool-0", Progress(committed=(("a", 0),))), 3.2)
        left = tuple(name for name in HOLDERS if name != "decode-0")
        assert router.handle(said("launcher", Died("decode-0", 1)), 3.3)[-4:] == [
            *cancels("a", at=left),
            Send("gateway-0", AttemptLost("a", 0)),
        ]


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
        for other in ("prefill-0", "pool-0", "decode-0"):
            if other != holder:
                lost = router.handle(said(other, beat(other, 2)), 3.2)
                assert Send("gateway-0", AttemptLost("a", 0)) not in lost
        lost = router.handle(said("launcher", Died(holder, 1)), 3.3)
        assert Send("gateway-0", AttemptLost("a", 0)) in lost

    def test_what_a_lost_owner_opened_ends(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        assert router.handle(said("launcher", Died("gateway-0", 1)), 3.1)[-len(HOLDERS) :] == cancels("a")
        assert router.held["requests"] == 0

    def test_what_a_lost_worker_said_last_does_not_count(self, router: RouterCore) -> None:
        """The request is with the pool again; taken to be at the dead worker, it would be lost with nobody."""
        router.handle(said("gateway-0", Submit(A)), 3.0)
        router.handle(said("pool-0", Progress(committed=(("a", 0),))), 3.1)
        router.handle(said("launcher", Died("decode-0", 1)), 3.2)
        assert router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.3) == []
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(said("launcher", Died("pool-0", 1)), 3.4)

    def test_a_commit_that_was_lost_with_the_pool_is_a_lost_attempt(self, router: RouterCore) -> None:
        """The prefill worker has sent it; the pool has died before it told us, or before it got it."""
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
        assert not any(isinstance(one, Send) and isinstance(one.message, Inquire) for one in gone)


class TestInquiries:
    """Where a frame was lost, it is asked who still has what, and what nobody has is lost."""

    def test_an_owner_hears_what_is_not_here(self, router: RouterCore) -> None:
        """Its Submit was lost, or our AttemptLost."""
        asked = Inquire((("a", 0), ("b", 1)))
        assert router.handle(said("gateway-0", asked), 3.0) == [lost_to_owner("a"), lost_to_owner("b", 1)]
        submit(router, "a", "b")
        assert lost_to_owner("b", 1) in router.handle(said("gateway-0", asked), 3.1), "only the attempt before is here"

    def test_an_owner_that_asks_has_the_holders_asked(self, router: RouterCore) -> None:
        submit(router, "a", "b", "c")
        router.handle(said("pool-0", Progress(committed=(("b", 0),))), 3.1)
        asked = Inquire((("a", 0), ("b", 0), ("c", 0)))
        assert router.handle(said("gateway-0", asked), 8.0) == [inquiry("prefill-0", "a", "c"), inquiry("pool-0", "b")]

    def test_an_owner_that_asks_after_an_older_attempt_has_moved_on(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(next_attempt(A))), 3.0)
        assert router.handle(said("gateway-0", Inquire((("a", 0),))), 3.1) == []

    def test_what_waits_for_a_worker_is_here(self) -> None:
        router = serving(("gateway-0", "pool-0"))
        submit(router, "a")
        assert router.handle(said("gateway-0", Inquire((("a", 0),))), 8.0) == []

    def test_before_everything_is_declared_nothing_is_unknown(self) -> None:
        router = recovering()
        assert router.handle(said("gateway-0", Inquire((("a", 0),))), 1.1) == []

    def test_a_dead_owner_asks_nothing(self, router: RouterCore) -> None:
        router.handle(said("launcher", Died("gateway-0", 1)), 3.0)
        assert router.handle(said("gateway-0", Inquire((("a", 0),))), 3.1) == []

    def test_what_its_holder_does_not_have_is_lost(self, router: RouterCore) -> None:
        submit(router, "a")
        unknown = Progress(unknown=(("a", 0),))
        assert router.handle(said("prefill-0", unknown), 3.1) == [*cancels("a"), lost_to_owner("a")]
        assert router.handle(said("prefill-0", unknown), 3.2) == []

    def test_what_has_gone_on_meanwhile_is_not_lost(self, router: RouterCore) -> None:
        """The inquiry met it on its way: who had it does not have it any more."""
        submit(router, "a")
        router.handle(said("pool-0", Progress(committed=(("a", 0),))), 3.1)
        assert router.handle(said("prefill-0", Progress(unknown=(("a", 0),))), 3.2) == []
        router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.3)
        assert router.handle(said("pool-0", Progress(unknown=(("a", 0),))), 3.4) == []
        assert router.held["requests"] == 1

    def test_an_older_attempt_that_is_unknown_does_not_touch_the_next(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(next_attempt(A))), 3.0)
        assert router.handle(said("prefill-0", Progress(unknown=(("a", 0),))), 3.1) == []

    @pytest.mark.parametrize("name", ["gateway-0", "pool-0", "prefill-0", "decode-0"])
    def test_after_lost_frames_all_is_asked_for(self, router: RouterCore, name: str) -> None:
        """Of a member, where things are; to a member, whether they reached it."""
        submit(router, "a", "b", "c")
        router.handle(said("pool-0", Progress(committed=(("a", 0), ("b", 0)))), 3.1)
        router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.2)
        asked = [inquiry("decode-0", "a"), inquiry("pool-0", "b"), inquiry("prefill-0", "c")]
        told = Send(name, roll(name, *((one, 1) for one in NAMES)))
        assert router.handle(said(name, Missed()), 3.3) == [told, *asked]
        assert router.handle(LinkGap(name), 3.4) == [Send(name, Missed()), told, *asked]

    def test_who_is_no_member_may_lose_what_it_likes(self, router: RouterCore) -> None:
        assert router.handle(said("launcher", Missed()), 3.0) == []
        assert router.handle(LinkGap("decode-7"), 3.0) == []

    def test_what_does_not_move_is_inquired_after(self, router: RouterCore) -> None:
        """The last frame on a link may have been lost: nothing tells of that."""
        submit(router, "a", now=3.0)
        submit(router, "b", now=4.0)
        assert self.refresh(router, 7.9) == []
        assert self.refresh(router, 8.0) == [inquiry("prefill-0", "a")]
        assert self.refresh(router, 9.0) == [inquiry("prefill-1", "b")]
        assert self.refresh(router, 12.9) == []
        router.handle(said("pool-0", Progress(committed=(("a", 0),))), 12.95)
        assert self.refresh(router, 13.5) == [], "one has moved, the other was asked for not long ago"
        assert self.refresh(router, 18.0) == [inquiry("pool-0", "a"), inquiry("prefill-1", "b")]

    def refresh(self, router: RouterCore, now: float) -> list[Command]:
        """Who is inquired of then."""
        commands = router.handle(TimerFired("refresh"), now)
        return [one for one in commands if isinstance(one, Send) and isinstance(one.message, Inquire)]


class TestLinesOfJobs:
    """They wait in their store, and are in no queue here."""

    def test_the_bound_is_of_others(self) -> None:
        limits = replace(LIMITS, most_open=10, queues=Queues(be=Bound(requests=1)))
        router = RouterCore(ROUTER_MEMBER, limits, 0.0)
        for name in ("gateway-0", "jobs-0", "pool-0", "prefill-0", "decode-0"):
            router.handle(said(name, beat(name)), 0.1)
        for timer in ("gathered", "recovered"):
            router.handle(TimerFired(timer), RECOVERED_AT)
        lines = [replace(request(name), owner="jobs-0", service=ServiceClass.BE) for name in ("l", "m")]
        for line in lines:
            assert Send("prefill-0", Prefill(line)) in router.handle(said("jobs-0", Submit(line)), 3.0)
        flex = [replace(request(name), service=ServiceClass.BE) for name in ("f", "g")]
        assert Send("prefill-0", Prefill(flex[0])) in router.handle(said("gateway-0", Submit(flex[0])), 3.0)
        [refused] = router.handle(said("gateway-0", Submit(flex[1])), 3.0)
        assert isinstance(refused, Send)
        assert isinstance(refused.message, Refused)
        assert refused.message.why == "1 be requests wait, the limit is 1"


class TestRecovery:
    def test_nothing_is_placed_before_it_is_known_what_is_held(self) -> None:
        router = recovering()
        assert router.handle(said("gateway-0", Submit(A)), 1.1) == []
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == [REBUILT, Send("prefill-0", Prefill(A))]

    @pytest.mark.parametrize("owner_first", [True, False])
    def test_what_is_held_stays_where_it_is(self, owner_first: bool) -> None:
        router = recovering()
        events = [said("gateway-0", Declare((A,))), said("decode-0", Holding((("a", 0),)))]
        for event in events if owner_first else events[::-1]:
            assert router.handle(event, 1.1) == []
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == [REBUILT]
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(said("launcher", Died("decode-0", 1)), 3.0)

    def test_what_was_declared_and_nobody_holds_starts_again(self) -> None:
        """With its next attempt: the others may have been told to drop this one, and to drop it again if it comes."""
        router = recovering()
        router.handle(said("gateway-0", Declare((A,))), 1.1)
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == [
            *cancels("a"),
            Send("gateway-0", AttemptLost("a", 0)),
            REBUILT,
        ]

    def test_of_two_attempts_the_higher_stays(self) -> None:
        router = recovering()
        router.handle(said("decode-0", Holding((("a", 0),))), 1.1)
        router.handle(said("gateway-0", Declare((next_attempt(A),))), 1.1)
        assert Send("gateway-0", AttemptLost("a", 1)) in router.handle(TimerFired("recovered"), RECOVERED_AT)

    def test_progress_before_the_declaration_counts(self) -> None:
        router = recovering()
        router.handle(said("prefill-0", Holding((("a", 0),))), 1.1)
        router.handle(said("pool-0", Progress(committed=(("a", 0),))), 1.2)
        router.handle(said("gateway-0", Declare((A,))), 1.3)
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == [REBUILT]
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(said("launcher", Died("pool-0", 1)), 3.0)

    def test_nothing_is_cancelled_whose_owner_may_declare_it_yet(self) -> None:
        router = recovering()
        assert router.handle(said("decode-0", Progress(joined=(("a", 0),))), 1.1) == []
        assert router.handle(said("gateway-0", Declare((A,))), 1.2) == []
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == [REBUILT]

    def test_what_ended_before_the_declaration_is_nowhere(self) -> None:
        router = recovering()
        router.handle(said("decode-0", Holding((("a", 0),))), 1.1)
        router.handle(said("decode-0", Progress(ended=(("a", 0),))), 1.2)
        router.handle(said("gateway-0", Declare((A,))), 1.3)
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(TimerFired("recovered"), RECOVERED_AT)

    def test_it_is_over_when_all_have_said_what_they_have(self) -> None:
        router = recovering()
        events = [said(name, Holding(())) for name in HOLDERS[1:]]
        events += [said("prefill-0", Holding((("a", 0),))), said("gateway-0", Declare((A,), is_last=False))]
        events += [said("gateway-0", Submit(B))]
        for number, event in enumerate(events):
            assert router.handle(event, 1.1 + 0.01 * number) == []
        commands = router.handle(said("gateway-0", Declare(())), 1.2)
        rebuilt = Figures(rebuilt_s=1.2, member="router")
        assert commands == [Send("gateway-0", rebuilt), Send("prefill-1", Prefill(B, "decode-0"))]
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == []

    def test_what_nobody_holds_may_be_on_its_way(self) -> None:
        """Its prefill worker has handed it to the pool, which had said before what it holds."""
        router = recovering()
        self.all_speak(router, 1.1)
        assert router.handle(said("gateway-0", Declare((A,))), 1.2) == [SetTimer("recovered", 1.2 + SETTLE_S)]
        found = router.handle(said("pool-0", Progress(committed=(("a", 0),))), 1.25)
        assert found == [Send("gateway-0", Figures(rebuilt_s=1.25, member="router"))]

    def test_what_is_not_found_soon_starts_again(self) -> None:
        router = recovering()
        self.all_speak(router, 1.1)
        router.handle(said("gateway-0", Declare((A,))), 1.2)
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(TimerFired("recovered"), 1.4)

    def test_nobody_is_waited_for_longer_than_for_who_does_not_answer(self) -> None:
        router = recovering()
        self.all_speak(router, 1.1)
        assert router.handle(said("gateway-0", Declare((A,))), RECOVERED_AT - 0.1) == []

    @pytest.mark.parametrize("late", ["decode-1", "gateway-1"])
    def test_who_came_meanwhile_is_heard_too(self, late: str) -> None:
        router = recovering()
        router.handle(said(late, beat(late)), 1.05)
        self.all_speak(router, 1.1)
        assert router.handle(said("gateway-0", Declare(())), 1.2) == []
        last = Declare(()) if late == "gateway-1" else Holding(())
        assert Send("gateway-0", Figures(rebuilt_s=1.3, member="router")) in router.handle(said(late, last), 1.3)

    def test_who_died_meanwhile_is_not_waited_for(self) -> None:
        router = recovering()
        self.all_speak(router, 1.1, but="prefill-1")
        router.handle(said("gateway-0", Declare(())), 1.2)
        commands = router.handle(said("launcher", Died("prefill-1", 1)), 1.3)
        assert Send("gateway-0", Figures(rebuilt_s=1.3, member="router")) in commands

    def test_a_gateway_that_comes_later_hears_how_long_it_took(self, router: RouterCore) -> None:
        figures = Figures(rebuilt_s=RECOVERED_AT, member="router")
        assert Send("gateway-1", figures) in router.handle(said("gateway-1", beat("gateway-1")), 3.0)

    def all_speak(self, router: RouterCore, now: float, but: str = "") -> None:
        for name in HOLDERS:
            if name != but:
                router.handle(said(name, Holding(())), now)

    def test_a_later_declaration_of_what_it_does_not_know_is_a_lost_attempt(self, router: RouterCore) -> None:
        declared = said("gateway-0", Declare((A,)))
        assert router.handle(declared, 3.0) == [*cancels("a"), Send("gateway-0", AttemptLost("a", 0))]
        router.handle(said("gateway-0", Submit(B)), 3.1)
        assert router.handle(said("gateway-0", Declare((B,))), 3.2) == []


class TestPredictedPlaces:
    """Workers say how long their prompts will take; without that, numbers of requests decide."""

    def told(self, router: RouterCore, worker: str, prompts_s: float) -> None:
        router.handle(
            said(worker, Progress(backlog=Backlog(prompts_s, prompt_token_s=0.01, rt_prompts_s=prompts_s))), 3.0
        )

    def where(self, router: RouterCore, name: str, prompt: int = 3) -> str:
        submitted = router.handle(said("gateway-0", Submit(request(name, prompt=prompt))), 3.0)
        [to] = [one.to for one in submitted if isinstance(one, Send) and isinstance(one.message, Prefill)]
        return to

    def test_the_worker_that_is_through_first_gets_it(self, router: RouterCore) -> None:
        self.told(router, "prefill-0", 2.0)
        self.told(router, "prefill-1", 0.5)
        assert self.where(router, "a") == "prefill-1"

    def test_what_was_sent_since_counts(self, router: RouterCore) -> None:
        self.told(router, "prefill-0", 2.0)
        self.told(router, "prefill-1", 0.5)
        assert self.where(router, "a", prompt=200) == "prefill-1"
        assert self.where(router, "b") == "prefill-0"

    def test_who_has_waited_for_a_worker_goes_by_urgency(self) -> None:
        router = serving(("gateway-0", "pool-0", "decode-0"))
        calm, urgent = request("a"), replace(request("b"), slo=Slo(ttft_s=0.1))
        for one in (calm, urgent):
            router.handle(said("gateway-0", Submit(one)), 3.0)
        placed = router.handle(said("prefill-0", beat("prefill-0")), 3.0)
        sent = [one.message for one in placed if isinstance(one, Send)]
        assert [one.request.id for one in sent if isinstance(one, Prefill)] == ["b", "a"]
