"""Lost frames, and attempts that do not move: which members are asked, and what follows from their answers."""

from __future__ import annotations

import pytest

from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import LinkGap, TimerFired
from alignedserve.protocol.messages import Died, Inquire, Missed, Progress, Submit
from alignedserve.router.state import RouterCore
from tests.router.routers import NAMES, A, cancels, inquiry, lost_to_owner, recovering, roll, sent, serving, submit
from tests.samples import next_attempt, said


class TestInquiries:
    """The router asks after a lost frame which member has which request; a request that no member has is lost."""

    def test_an_owner_hears_what_is_not_here(self, router: RouterCore) -> None:
        """The owner's Submit or the router's AttemptLost was lost."""
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
        """The inquiry crossed the request on its way: the member that had the request no longer has it."""
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
        """A lost frame from the member may say where requests are; a lost frame to it may have brought requests."""
        submit(router, "a", "b", "c")
        router.handle(said("pool-0", Progress(committed=(("a", 0), ("b", 0)))), 3.1)
        router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.2)
        asked = [inquiry("decode-0", "a"), inquiry("pool-0", "b"), inquiry("prefill-0", "c")]
        told = Send(name, roll(name, *((member, 1) for member in NAMES)))
        assert router.handle(said(name, Missed()), 3.3) == [told, *asked]
        assert router.handle(LinkGap(name), 3.4) == [Send(name, Missed()), told, *asked]

    def test_a_sender_that_is_no_member_may_lose_what_it_likes(self, router: RouterCore) -> None:
        assert router.handle(said("launcher", Missed()), 3.0) == []
        assert router.handle(LinkGap("decode-7"), 3.0) == []

    def test_what_does_not_move_is_inquired_after(self, router: RouterCore) -> None:
        """The last frame on a link may have been lost: nothing would show that."""
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
        """Fire the refresh timer, and return the inquiries that follow."""
        return [Send(*asked) for asked in sent(router.handle(TimerFired("refresh"), now), Inquire)]
