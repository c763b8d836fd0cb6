"""A router that has just started: what it waits for, and what it concludes from what it hears."""

from __future__ import annotations

import pytest

from alignedserve.protocol.commands import Send, SetTimer
from alignedserve.protocol.events import TimerFired
from alignedserve.protocol.messages import AttemptLost, Declare, Died, Figures, Holding, Prefill, Progress, Submit
from alignedserve.router.members import SETTLE_S
from alignedserve.router.state import RouterCore
from tests.router.routers import HOLDERS, REBUILT, RECOVERED_AT, A, B, beat, cancels, recovering
from tests.samples import next_attempt, said


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
        died = said("launcher", Died("decode-0", 1))
        assert Send("gateway-0", AttemptLost("a", 0, died=True, alone=True)) in router.handle(died, 3.0)

    def test_what_was_declared_and_nobody_holds_starts_again(self) -> None:
        """A next attempt starts: members may have been told to drop this attempt, and would drop it again."""
        router = recovering()
        router.handle(said("gateway-0", Declare((A,))), 1.1)
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == [
            *cancels("a"),
            Send("gateway-0", AttemptLost("a", 0)),
            REBUILT,
        ]

    def test_what_a_member_held_that_has_died_since_starts_again(self) -> None:
        router = recovering()
        router.handle(said("decode-0", Holding((("a", 0),))), 1.1)
        router.handle(said("launcher", Died("decode-0", 1)), 1.2)
        router.handle(said("gateway-0", Declare((A,))), 1.3)
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(TimerFired("recovered"), RECOVERED_AT)

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

    def test_no_request_is_cancelled_while_its_owner_may_declare_it_yet(self) -> None:
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

    def test_what_no_owner_declared_is_cancelled_once_all_have_spoken(self) -> None:
        """Its owner had given it up, and the last router died before it had told the member (fuzz seed 82002323)."""
        router = recovering()
        for name in HOLDERS:
            router.handle(said(name, Holding((("a", 0),) if name == "pool-0" else ())), 1.1)
        rebuilt = Figures(rebuilt_s=1.2, member="router")
        assert router.handle(said("gateway-0", Declare(())), 1.2) == [*cancels("a"), Send("gateway-0", rebuilt)]

    def test_nothing_is_cancelled_while_an_owner_is_only_slow(self) -> None:
        router = recovering()
        router.handle(said("pool-0", Holding((("a", 0),))), 1.1)
        assert router.handle(TimerFired("recovered"), RECOVERED_AT) == [REBUILT]

    def test_what_nobody_holds_may_be_on_its_way(self) -> None:
        """The prefill worker has handed the request to the pool, which had reported its holdings before."""
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

    def test_no_member_is_waited_for_longer_than_a_silent_member(self) -> None:
        router = recovering()
        self.all_speak(router, 1.1)
        assert router.handle(said("gateway-0", Declare((A,))), RECOVERED_AT - 0.1) == []

    @pytest.mark.parametrize("late", ["decode-1", "gateway-1"])
    def test_a_member_that_came_meanwhile_is_heard_too(self, late: str) -> None:
        router = recovering()
        router.handle(said(late, beat(late)), 1.05)
        self.all_speak(router, 1.1)
        assert router.handle(said("gateway-0", Declare(())), 1.2) == []
        last = Declare(()) if late == "gateway-1" else Holding(())
        assert Send("gateway-0", Figures(rebuilt_s=1.3, member="router")) in router.handle(said(late, last), 1.3)

    def test_a_member_that_died_meanwhile_is_not_waited_for(self) -> None:
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
