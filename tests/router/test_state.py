"""The router: who is there, where each request is, and what is lost with whom."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from alignedserve.messages import (
    AttemptLost,
    Cancel,
    Command,
    Declare,
    Died,
    Heartbeat,
    Holding,
    Members,
    Message,
    Prefill,
    Progress,
    Refused,
    Send,
    SetTimer,
    Submit,
    TimerFired,
)
from alignedserve.router.state import RECOVERY_S, RouterCore, RouterLimits
from tests.samples import ROUTER_MEMBER, member, next_attempt, request, said

LIMITS = RouterLimits(most_open=3, heartbeat_s=0.5, death_s=3.0)
GATHERED_AT = 1.0
RECOVERED_AT = GATHERED_AT + RECOVERY_S
NAMES = ("gateway-0", "pool-0", "prefill-0", "prefill-1", "decode-0")
HOLDERS = NAMES[1:]
A, B = request("a"), request("b")


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
    assert router.handle(TimerFired("recovered"), RECOVERED_AT) == []
    return router


@pytest.fixture
def router() -> RouterCore:
    return serving()


def cancels(name: str, attempt: int = 0, at: Sequence[str] = HOLDERS) -> list[Command]:
    return [Send(holder, Cancel(name, attempt)) for holder in at]


def announcement(*incarnations: tuple[str, int]) -> list[Command]:
    members = Members((ROUTER_MEMBER, *(member(*one) for one in incarnations)))
    return [Send(name, members) for name, _ in incarnations]


class TestMembers:
    def test_nobody_is_announced_before_everybody_is_gathered(self) -> None:
        """All others would take for lost whom the first announcement does not name."""
        router = RouterCore(ROUTER_MEMBER, LIMITS, 0.0)
        assert router.start() == [SetTimer("gathered", GATHERED_AT), SetTimer("liveness", 0.5)]
        assert router.handle(said("decode-0", beat("decode-0")), 0.1) == []
        assert router.handle(said("gateway-0", beat("gateway-0")), 0.2) == []
        assert router.handle(TimerFired("gathered"), GATHERED_AT) == [
            *announcement(("decode-0", 1), ("gateway-0", 1)),
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


class TestRecovery:
    def test_nothing_is_placed_before_it_is_known_what_is_held(self) -> None:
        router = recovering()
        assert router.handle(said("gateway-0", Submit(A)), 1.1) == []
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == [Send("prefill-0", Prefill(A))]

    @pytest.mark.parametrize("owner_first", [True, False])
    def test_what_is_held_stays_where_it_is(self, owner_first: bool) -> None:
        router = recovering()
        events = [said("gateway-0", Declare((A,))), said("decode-0", Holding((("a", 0),)))]
        for event in events if owner_first else events[::-1]:
            assert router.handle(event, 1.1) == []
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == []
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(said("launcher", Died("decode-0", 1)), 3.0)

    def test_what_was_declared_and_nobody_holds_starts_again(self) -> None:
        """With its next attempt: the others may have been told to drop this one, and to drop it again if it comes."""
        router = recovering()
        router.handle(said("gateway-0", Declare((A,))), 1.1)
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == [
            *cancels("a"),
            Send("gateway-0", AttemptLost("a", 0)),
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
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == []
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(said("launcher", Died("pool-0", 1)), 3.0)

    def test_what_ended_before_the_declaration_is_nowhere(self) -> None:
        router = recovering()
        router.handle(said("decode-0", Holding((("a", 0),))), 1.1)
        router.handle(said("decode-0", Progress(ended=(("a", 0),))), 1.2)
        router.handle(said("gateway-0", Declare((A,))), 1.3)
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(TimerFired("recovered"), RECOVERED_AT)

    def test_a_later_declaration_of_what_it_does_not_know_is_a_lost_attempt(self, router: RouterCore) -> None:
        declared = said("gateway-0", Declare((A,)))
        assert router.handle(declared, 3.0) == [*cancels("a"), Send("gateway-0", AttemptLost("a", 0))]
        router.handle(said("gateway-0", Submit(B)), 3.1)
        assert router.handle(said("gateway-0", Declare((B,))), 3.2) == []
