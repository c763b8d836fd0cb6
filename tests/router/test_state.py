"""The router's core: where each request is, from its Submit to its end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from alignedserve.core import Rejection, Request, Role, ServiceClass, Slo
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Send
from alignedserve.protocol.events import AtWork
from alignedserve.protocol.messages import (
    LAUNCHER,
    AskDecisions,
    Attempt,
    AttemptLost,
    Backlog,
    Cancel,
    Decisions,
    Declare,
    Died,
    Infeasible,
    Message,
    Prefill,
    Progress,
    Refused,
    Report,
    Submit,
)
from alignedserve.router.placing.admission import Bound, Queues
from alignedserve.router.placing.placement import Placement
from alignedserve.router.state import RouterCore
from tests.calls import calls_of
from tests.router.routers import HOLDERS, LIMITS, A, B, beat, cancels, placed, sent, serving, submit
from tests.samples import next_attempt, request, said


class TestPlacement:
    def test_the_least_loaded_prefill_worker_gets_the_prompt(self, router: RouterCore) -> None:
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == [Send("prefill-0", Prefill(A))]
        assert router.handle(said("gateway-0", Submit(B)), 3.0) == [Send("prefill-1", Prefill(B))]

    def test_what_has_left_a_worker_counts_there_no_more(self, router: RouterCore) -> None:
        submit(router, "a", "b", "c")
        for left, new in (("cb", "d"), ("d", "e")):
            for name in left:
                router.handle(said("gateway-0", Cancel(name, 0)), 3.0)
            told = router.handle(said("gateway-0", Submit(request(new))), 3.0)
            assert placed(told) == [("prefill-1", new)], "a is on the other"

    def test_it_hears_which_decode_worker_told_of_room(self, router: RouterCore) -> None:
        router.handle(said("decode-0", Report(free_blocks=9)), 3.0)
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == [Send("prefill-0", Prefill(A, "decode-0"))]

    def test_colocated_the_decode_worker_does(self) -> None:
        colocated = replace(LIMITS, prompts_on=Role.DECODE)
        router = serving(("gateway-0", "pool-0", "decode-0"), colocated)
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == [Send("decode-0", Prefill(A))]

    def test_without_a_prefill_worker_a_pool_keeps_prompts_waiting(self) -> None:
        router = serving(("gateway-0", "pool-0", "decode-0"))
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == []
        assert Send("prefill-0", Prefill(A)) in router.handle(said("prefill-0", beat("prefill-0")), 3.1)

    def test_beyond_the_bound_a_request_is_refused_but_a_next_attempt_is_not(self, router: RouterCore) -> None:
        for name in "xyz":
            router.handle(said("gateway-0", Submit(request(name))), 3.0)
        why = "the server is full: 3 requests are open, and at most 3 may be"
        refused = Refused("a", 0, Rejection.OPEN, why, 1.0)
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == [Send("gateway-0", refused)]
        [(_, told)] = sent(router.handle(said("gateway-0", AskDecisions(1, "a")), 3.0), Decisions)
        assert [(noted.kind, noted.why) for noted in told.findings.decisions] == [(Kind.REFUSED, why)]
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
        """The owner's last frame may come after the news of its death; no member would ever cancel the request."""
        router.handle(said("launcher", Died("gateway-0", 1)), 3.0)
        assert router.handle(said("gateway-0", Submit(A)), 3.0) == []
        assert router.held["requests"] == 0


class TestRoad:
    def test_a_cancel_reaches_all_that_may_hold_the_request(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        assert router.handle(said("gateway-0", Cancel("a", 0)), 3.0) == cancels("a")
        assert router.handle(said("gateway-0", Cancel("a", 0)), 3.0) == []

    def test_a_request_that_waits_for_a_worker_is_cancelled(self) -> None:
        router = serving(("gateway-0", "pool-0", "decode-0"))
        router.handle(said("gateway-0", Submit(A)), 3.0)
        router.handle(said("gateway-0", Cancel("a", 0)), 3.1)
        assert router.held["requests"] == 0
        met = router.handle(said("prefill-0", beat("prefill-0")), 3.2)
        assert not placed(met)

    def test_where_it_fails_to_place_a_request_it_names_that_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else the request of whatever event it heard would be charged with its death."""
        at_work = AtWork()
        router = serving(("gateway-0", "pool-0", "decode-0"), at_work=at_work)
        router.handle(said("gateway-0", Submit(A)), 3.0)

        def fails(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Placement, "placed", fails)
        with pytest.raises(ZeroDivisionError):
            router.handle(said("prefill-0", beat("prefill-0")), 3.2)
        assert at_work.attempts == (("a", 0),)

    @pytest.mark.parametrize("told", [Submit(A), Declare((A,))])
    @pytest.mark.parametrize("others", [(), (("b", 0),)])
    def test_an_attempt_at_which_its_earlier_life_ended_has_a_death_and_is_not_touched(
        self, told: Message, others: tuple[Attempt, ...]
    ) -> None:
        at_work = AtWork()
        at_work.left = (("a", 0), *others)
        router = serving(at_work=at_work)
        charge = Send("gateway-0", AttemptLost("a", 0, died=True, alone=not others))
        assert router.handle(said("gateway-0", told), 3.0) == [charge]
        assert router.held["requests"] == 0
        assert router.handle(said("gateway-0", Submit(next_attempt(A))), 3.1)
        assert router.held["requests"] == 1

    def test_an_attempt_before_the_present_one_that_ended_a_pool_has_a_death(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(next_attempt(A))), 3.0)
        charge = Send("gateway-0", AttemptLost("a", 0, died=True, alone=True))
        assert router.handle(said("pool-0", Progress(felled=(("a", 0),))), 3.1) == [charge]

    def test_what_was_cut_off_amid_its_transfer_has_a_death_that_proves_nothing(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        lost = AttemptLost("a", 0, silent=True)
        assert router.handle(said("decode-0", Progress(cut=(("a", 0),))), 3.1)[-1] == Send("gateway-0", lost)

    def test_what_a_pool_worked_on_when_it_ended_has_a_death(self, router: RouterCore) -> None:
        for waiting in (A, B):
            router.handle(said("gateway-0", Submit(waiting)), 3.0)
        router.handle(said("pool-0", Progress(committed=(("a", 0), ("b", 0)))), 3.1)
        died = router.handle(said(LAUNCHER, Died("pool-0", 1, felled=(("a", 0),))), 3.2)
        lost = [AttemptLost("a", 0, died=True, alone=True), AttemptLost("b", 0)]
        assert sent(died, AttemptLost) == [("gateway-0", each) for each in lost]

    def test_what_a_worker_was_offered_when_it_ended_has_a_death(self, router: RouterCore) -> None:
        """The request is still at its prefill worker, which would offer it to the next one."""
        router.handle(said("gateway-0", Submit(A)), 3.0)
        died = router.handle(said(LAUNCHER, Died("decode-0", 1, felled=(("a", 0),))), 3.1)
        assert Send("gateway-0", AttemptLost("a", 0, died=True, alone=True)) in died
        assert router.held["requests"] == 0

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

    @pytest.mark.parametrize("others", [(), (("b", 0),)])
    def test_an_attempt_at_which_a_core_failed_has_a_death(
        self, router: RouterCore, others: tuple[tuple[str, int], ...]
    ) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        felled = said("pool-0", Progress(felled=(("a", 0), *others)))
        lost = AttemptLost("a", 0, died=True, alone=not others)
        assert router.handle(felled, 3.1) == [*cancels("a"), Send("gateway-0", lost)]
        assert router.handle(felled, 3.2) == []

    @pytest.mark.parametrize(
        ("holder", "progress"),
        [("pool-0", Progress(committed=(("a", 0),))), ("decode-0", Progress(joined=(("a", 0),)))],
    )
    def test_what_nobody_wants_any_more_is_cancelled_where_it_turns_up_and_where_it_would_be_offered_again(
        self, router: RouterCore, holder: str, progress: Progress
    ) -> None:
        """The request's Cancel was lost. A prefill worker would offer its KV again to a decode worker that alone is
        told to drop it (fuzz seed 71003871). Where the request has ended, another decode worker keeps its output, which
        the owner may still lack: told to drop that, it cost the request another attempt (fuzz seed 94002550)."""
        told = cancels("a", at=(holder, "prefill-0", "prefill-1"))
        assert router.handle(said(holder, progress), 3.0) == told
        router.handle(said("gateway-0", Submit(next_attempt(A))), 3.1)
        assert router.handle(said(holder, progress), 3.2) == told, "an older attempt"

    def test_a_request_that_had_to_leave_waits_in_the_pool_again(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.1)
        router.handle(said("decode-0", Progress(returned=(("a", 0),))), 3.2)
        assert router.handle(said("decode-0", Progress(unknown=(("a", 0),))), 3.3) == [], "it is elsewhere"
        assert Send("gateway-0", AttemptLost("a", 0)) in router.handle(said("launcher", Died("pool-0", 1)), 3.4)

    def test_a_request_that_had_to_leave_is_lost_without_a_pool(self, router: RouterCore) -> None:
        router.handle(said("gateway-0", Submit(A)), 3.0)
        router.handle(said("decode-0", Progress(joined=(("a", 0),))), 3.1)
        router.handle(said("launcher", Died("pool-0", 1)), 3.2)
        returned = router.handle(said("decode-0", Progress(returned=(("a", 0),))), 3.3)
        assert Send("gateway-0", AttemptLost("a", 0)) in returned

    def test_a_request_that_had_to_leave_may_have_joined_elsewhere_before_that_is_heard(
        self, router: RouterCore
    ) -> None:
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
            Send("gateway-0", AttemptLost("a", 0, died=True, alone=True)),
        ]


class TestLinesOfJobs:
    """Lines of jobs wait in their store, and are in no queue of the router."""

    def test_the_bound_is_of_others(self) -> None:
        limits = replace(LIMITS, most_open=10, queues=Queues(be=Bound(requests=1)))
        router = serving(("gateway-0", "jobs-0", "pool-0", "prefill-0", "decode-0"), limits)
        lines = [replace(request(name), owner="jobs-0", service=ServiceClass.BE) for name in ("l", "m")]
        for line in lines:
            assert Send("prefill-0", Prefill(line)) in router.handle(said("jobs-0", Submit(line)), 3.0)
        flex = [replace(request(name), service=ServiceClass.BE) for name in ("f", "g")]
        assert Send("prefill-0", Prefill(flex[0])) in router.handle(said("gateway-0", Submit(flex[0])), 3.0)
        [(_, refused)] = sent(router.handle(said("gateway-0", Submit(flex[1])), 3.0), Refused)
        assert refused.why == "the server is full: 1 best-effort requests wait, and at most 1 may"


class TestPromisesThatNobodyCouldKeep:
    """A prompt of 3 tokens takes 3 s alone, and its ttft is a second."""

    @pytest.fixture
    def slow(self, router: RouterCore) -> RouterCore:
        for worker in ("prefill-0", "prefill-1"):
            router.handle(said(worker, Progress(backlog=Backlog(0.0, 1.0, 0.0, 1.0, 1.0))), 3.0)
        return router

    def test_the_owner_is_told_and_the_request_runs(self, slow: RouterCore) -> None:
        told, *others = slow.handle(said("gateway-0", Submit(A)), 3.0)
        assert told == Send("gateway-0", Infeasible("a", 0))
        assert Send("prefill-0", Prefill(A)) in others

    def test_a_strict_request_is_refused(self, slow: RouterCore) -> None:
        strict = replace(A, slo=Slo(ttft_s=1.0, strict=True))
        [(_, refused)] = sent(slow.handle(said("gateway-0", Submit(strict)), 3.0), Refused)
        assert refused.why.startswith("its prompt alone takes 3")
        assert "its ttft is 1 s" in refused.why

    @pytest.mark.parametrize(
        "other", [replace(A, slo=Slo(ttft_s=3.0)), replace(A, service=ServiceClass.BE), next_attempt(A)], ids=str
    )
    def test_nothing_is_told_of_others(self, slow: RouterCore, other: Request) -> None:
        """A later attempt is as late as the first, and its owner knows."""
        commands = slow.handle(said("gateway-0", Submit(other)), 3.0)
        assert not [command for command in commands if isinstance(command, Send) and command.to == "gateway-0"]


class TestPredictedPlaces:
    """Workers report how long their prompts will take; without reports, numbers of requests decide."""

    def told(self, router: RouterCore, worker: str, prompts_s: float) -> None:
        backlog = Backlog(prompts_s, 0.01, rt_prompts_s=prompts_s, loaded_token_s=0.01, rt_loaded_token_s=0.01)
        router.handle(said(worker, Progress(backlog=backlog)), 3.0)

    def where(self, router: RouterCore, name: str, prompt: int = 3) -> str:
        patient = replace(request(name, prompt=prompt), slo=Slo(ttft_s=10.0))
        [(worker, _)] = placed(router.handle(said("gateway-0", Submit(patient)), 3.0))
        return worker

    def test_the_worker_that_is_through_first_gets_it(self, router: RouterCore) -> None:
        self.told(router, "prefill-0", 2.0)
        self.told(router, "prefill-1", 0.5)
        assert self.where(router, "a") == "prefill-1"

    def test_what_was_sent_since_counts(self, router: RouterCore) -> None:
        self.told(router, "prefill-0", 2.0)
        self.told(router, "prefill-1", 0.5)
        assert self.where(router, "a", prompt=200) == "prefill-1"
        assert self.where(router, "b") == "prefill-0"

    def test_a_request_that_has_waited_for_a_worker_goes_by_urgency(self) -> None:
        router = serving(("gateway-0", "pool-0", "decode-0"))
        calm, urgent = request("a"), replace(request("b"), slo=Slo(ttft_s=0.1))
        for new_request in (calm, urgent):
            router.handle(said("gateway-0", Submit(new_request)), 3.0)
        met = router.handle(said("prefill-0", beat("prefill-0")), 3.0)
        assert [name for _, name in placed(met)] == ["b", "a"]

    def test_the_more_wait_for_a_worker_the_more_work_is_none_of_them(self) -> None:
        """Function calls are counted: the hundredth request costs what the second does, as no worker is there."""
        router = serving(("gateway-0", "pool-0", "decode-0"), replace(LIMITS, most_open=1000))
        router.handle(said("gateway-0", Submit(request("first"))), 3.0)
        counted = list[int]()
        for number in range(100):
            submitted = said("gateway-0", Submit(request(str(number))))
            counted.append(calls_of(partial(router.handle, submitted, 3.0)))
        assert max(counted) < 1.5 * min(counted)
