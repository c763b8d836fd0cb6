"""Requests that may be what ends their workers run alone on a worker, one after the other; all others go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from alignedserve.core import SUSPECT_DEATHS, Role, ServiceClass
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import LinkGap, TimerFired
from alignedserve.protocol.messages import (
    Acquit,
    Cancel,
    Declare,
    Died,
    Heartbeat,
    Holding,
    Inquire,
    Prefill,
    Progress,
    Reserve,
    StepLate,
    Submit,
)
from alignedserve.router.state import RouterCore
from alignedserve.router.suspects import BACK_S, SUSPECT_WAITS_S, TRIED_TOGETHER, UNCERTAIN_S
from tests.router.routers import LIMITS, RECOVERED_AT, beat, lost_to_owner, placed, recovering, sent, serving
from tests.samples import member, request, said

COLOCATED = replace(LIMITS, most_open=30, prompts_on=Role.DECODE)
NOW = 3.0


def colocated(*workers: str) -> RouterCore:
    return serving(("gateway-0", *workers), COLOCATED)


def suspect(name: str, attempt: int = 2) -> Submit:
    return Submit(replace(request(name), attempt=attempt, deaths=SUSPECT_DEATHS))


def submits(router: RouterCore, submit: Submit, now: float = NOW) -> list[Command]:
    return router.handle(said("gateway-0", submit), now)


def is_closed(router: RouterCore, worker: str, *holds: tuple[str, int], now: float = NOW) -> list[Command]:
    return router.handle(said(worker, Holding(holds, 0, is_reserved=True)), now)


def reserved(commands: Sequence[Command]) -> list[tuple[str, bool]]:
    return [(worker, reserve.is_on) for worker, reserve in sent(commands, Reserve)]


def test_an_empty_worker_runs_a_suspect_once_nothing_more_can_join_there() -> None:
    router = colocated("decode-0", "decode-1")
    assert placed(submits(router, Submit(request("a")))) == [("decode-0", "a")]
    told = submits(router, suspect("s"))
    assert (placed(told), reserved(told)) == ([], [("decode-1", True)])
    told = is_closed(router, "decode-1", ("joined", 0))
    assert placed(told) == [("decode-1", "s")]


def test_all_others_run_on_the_other_workers_meanwhile() -> None:
    router = colocated("decode-0", "decode-1")
    submits(router, suspect("s"))
    is_closed(router, "decode-0")
    others = [placed(submits(router, Submit(request(name)))) for name in "abcd"]
    assert others == [[("decode-1", name)] for name in "abcd"]


def test_suspects_run_one_after_the_other_and_then_all_that_waited() -> None:
    router = colocated("decode-0")
    submits(router, suspect("s"))
    is_closed(router, "decode-0")
    assert placed(submits(router, suspect("t"))) == []
    assert placed(submits(router, Submit(request("a")))) == []
    ended = router.handle(said("decode-0", Progress(ended=(("s", 2),))), NOW)
    assert placed(ended) == [("decode-0", "t")], "nothing has joined meanwhile: the worker is closed"
    acquitted = submits(router, Submit(replace(request("t"), attempt=3)))
    assert reserved(acquitted) == [("decode-0", False)]
    assert placed(acquitted) == [("decode-0", "a"), ("decode-0", "t")]


def test_a_worker_that_died_is_awaited_before_another_is_emptied() -> None:
    router = colocated("decode-0", "decode-1")
    submits(router, Submit(request("a")))
    submits(router, Submit(request("b")))
    router.handle(said("launcher", Died("decode-1", 1)), NOW)
    assert reserved(submits(router, suspect("s"))) == []
    assert reserved(router.handle(TimerFired("look"), NOW + BACK_S - 1)) == []
    back = router.handle(said("decode-1", beat("decode-1", 2)), NOW + BACK_S - 1)
    assert reserved(back) == [("decode-1", True)]


def test_where_no_worker_becomes_empty_one_gives_up_what_it_has() -> None:
    router = colocated("decode-0")
    submits(router, Submit(request("a")))
    assert reserved(submits(router, suspect("s"))) == []
    assert reserved(router.handle(TimerFired("look"), NOW + SUSPECT_WAITS_S)) == [("decode-0", True)]
    told = is_closed(router, "decode-0", ("a", 0))
    assert lost_to_owner("a") in told, "its worker lives: that is no death"
    assert told.index(Send("decode-0", Cancel("a", 0))) < told.index(Send("decode-0", Prefill(suspect("s").request)))


def test_a_suspect_takes_its_worker_before_a_request_that_comes_just_then() -> None:
    router = colocated("decode-0", "decode-1")
    assert placed([*submits(router, Submit(request("a"))), *submits(router, Submit(request("b")))]) == [
        ("decode-0", "a"),
        ("decode-1", "b"),
    ]
    submits(router, suspect("s"))
    told = submits(router, Submit(request("c")), NOW + SUSPECT_WAITS_S)
    assert (reserved(told), placed(told)) == ([("decode-0", True)], [("decode-1", "c")])


def test_the_owner_hears_whether_the_worker_died_and_had_nothing_else() -> None:
    router = colocated("decode-0")
    submits(router, Submit(request("a")))
    submits(router, Submit(request("b")))
    died = router.handle(said("launcher", Died("decode-0", 1)), NOW)
    assert [lost for lost in died if lost in (lost_to_owner("a", died=True), lost_to_owner("b", died=True))] == [
        lost_to_owner("a", died=True),
        lost_to_owner("b", died=True),
    ]
    router.handle(said("decode-0", beat("decode-0", 2)), NOW)
    submits(router, suspect("s"))
    router.handle(said("decode-0", Holding((), 0, is_reserved=True), 2), NOW)
    assert lost_to_owner("s", 2, died=True, alone=True) in router.handle(said("launcher", Died("decode-0", 2)), NOW)


def test_what_joined_a_worker_just_before_its_end_is_charged_too() -> None:
    """The pool has put it back: it would end the next worker, and the next, without a word to its owner."""
    router = serving()
    submits(router, Submit(request("a")))
    router.handle(said("pool-0", Progress(committed=(("a", 0),))), NOW)
    router.handle(said("launcher", Died("decode-0", 1)), NOW)
    late = router.handle(said("decode-0", Progress(joined=(("a", 0),))), NOW)
    assert lost_to_owner("a", died=True) in late


def test_a_suspect_that_a_worker_gives_to_the_pool_starts_again() -> None:
    router = serving()
    submits(router, suspect("s"))
    is_closed(router, "decode-0")
    assert lost_to_owner("s", 2) in router.handle(said("decode-0", Progress(returned=(("s", 2),))), NOW)


def test_with_prefill_workers_a_decode_worker_runs_all_of_a_suspect() -> None:
    router = serving()
    assert reserved(submits(router, suspect("s"))) == [("decode-0", True)]
    assert placed(is_closed(router, "decode-0")) == [("decode-0", "s")]
    assert placed(submits(router, Submit(request("a")))) == [("prefill-0", "a")]


def test_the_next_router_keeps_the_worker_of_a_suspect_free() -> None:
    router = recovering(("gateway-0", "decode-0", "decode-1"), COLOCATED)
    router.handle(said("gateway-0", Declare((suspect("s").request,))), 1.1)
    router.handle(said("decode-0", Holding((("s", 2),))), 1.1)
    assert reserved(router.handle(TimerFired("recovered"), RECOVERED_AT)) == [("decode-0", True)]
    assert placed(submits(router, Submit(request("a")))) == [("decode-1", "a")]


def test_a_worker_that_missed_what_it_was_told_hears_it_again() -> None:
    router = colocated("decode-0")
    submits(router, suspect("s"))
    assert reserved(router.handle(LinkGap("decode-0"), NOW)) == [("decode-0", True)]
    router.handle(said("gateway-0", Cancel("s", 2)), NOW)
    assert reserved(router.handle(LinkGap("decode-0"), NOW))[-1] == ("decode-0", False)


def charged(name: str, attempt: int = 1, **fields: Any) -> Submit:
    return Submit(replace(request(name), attempt=attempt, deaths=1, **fields))


class TestRequestsWithOneDeath:
    """Few run at a time: if one of them ends the next worker too, few run alone."""

    LIMITS = replace(COLOCATED, most_open=100)

    def full(self, *workers: str) -> RouterCore:
        router = serving(("gateway-0", *workers), self.LIMITS)
        for number in range(TRIED_TOGETHER * len(workers)):
            assert len(placed(submits(router, charged(f"r{number}")))) == 1
        assert placed(submits(router, charged("next"))) == []
        return router

    def test_others_pass_those_that_wait(self) -> None:
        router = self.full("decode-0")
        assert placed(submits(router, Submit(request("a")))) == [("decode-0", "a")]
        document = charged("d", service=ServiceClass.BE)
        assert placed(submits(router, document)) == [("decode-0", "d")], "classes do not wait for each other"

    def test_each_worker_has_its_share(self) -> None:
        self.full("decode-0", "decode-1")

    def test_workers_that_only_decode_have_their_share_and_those_that_run_prompts_no_more_than_theirs(self) -> None:
        router = serving(("gateway-0", "prefill-0", "pool-0", "decode-0", "decode-1"), replace(LIMITS, most_open=100))
        for share in range(3):
            names = [f"r{share}-{number}" for number in range(TRIED_TOGETHER)]
            assert [placed(submits(router, charged(name))) for name in names] == [
                [("prefill-0", name)] for name in names
            ]
            assert placed(submits(router, charged(f"next-{share}"))) == []
            router.handle(said("gateway-0", Cancel(f"next-{share}", 1)), NOW)
            router.handle(said("pool-0", Progress(committed=tuple((name, 1) for name in names))), NOW)
            router.handle(said("decode-1", Progress(joined=tuple((name, 1) for name in names))), NOW)
        assert placed(submits(router, charged("last"))) == []

    def test_the_next_one_begins_when_one_has_got_further_or_is_gone(self) -> None:
        router = self.full("decode-0")
        assert placed(router.handle(said("gateway-0", Acquit("r0", 0)), NOW)) == [], "an earlier attempt"
        assert placed(router.handle(said("gateway-0", Acquit("r0", 1)), NOW)) == [("decode-0", "next")]
        assert placed(submits(router, charged("other"))) == []
        assert placed(router.handle(said("decode-0", Progress(ended=(("r0", 1),))), NOW)) == [], "it has its place free"
        assert placed(router.handle(said("decode-0", Progress(ended=(("r1", 1),))), NOW)) == [("decode-0", "other")]
        assert placed(submits(router, charged("last"))) == []
        assert placed(router.handle(said("gateway-0", Cancel("r2", 1)), NOW)) == [("decode-0", "last")]

    def test_all_begin_again_after_the_next_death(self) -> None:
        router = self.full("decode-0")
        router.handle(said("launcher", Died("decode-0", 1)), NOW)
        router.handle(said("decode-0", beat("decode-0", 2)), NOW)
        assert placed(submits(router, charged("again", 2))) == [("decode-0", "again")]


class TestLateSteps:
    def test_nothing_is_placed_where_a_step_is_late(self) -> None:
        router = colocated("decode-0", "decode-1")
        late = Heartbeat(member("decode-0"), 6.0)
        assert router.handle(said("decode-0", late), NOW) == [Send("gateway-0", StepLate("decode-0", 6.0))]
        others = [placed(submits(router, Submit(request(name)))) for name in "ab"]
        assert others == [[("decode-1", "a")], [("decode-1", "b")]]
        over = router.handle(said("decode-0", beat("decode-0")), NOW)
        assert over == [Send("gateway-0", StepLate("decode-0", 0.0))]
        assert router.handle(said("decode-0", beat("decode-0")), NOW) == []
        assert placed(submits(router, Submit(request("c")))) == [("decode-0", "c")]

    def test_a_worker_that_ends_for_it_is_taken_again_when_it_is_back(self) -> None:
        router = colocated("decode-0")
        router.handle(said("decode-0", Heartbeat(member("decode-0"), 6.0)), NOW)
        assert placed(submits(router, Submit(request("a")))) == []
        router.handle(said("launcher", Died("decode-0", 1)), NOW)
        assert placed(router.handle(said("decode-0", beat("decode-0", 2)), NOW)) == [("decode-0", "a")]


def falls_silent(router: RouterCore) -> list[Command]:
    told = list[Command]()
    for at in [NOW + number * LIMITS.heartbeat_s for number in range(20)]:
        router.handle(said("gateway-0", beat("gateway-0")), at)
        told += router.handle(TimerFired("liveness"), at)
    return told


def test_a_silent_worker_whose_process_has_ended_is_charged_then() -> None:
    router = colocated("decode-0")
    submits(router, Submit(request("a")))
    assert lost_to_owner("a", alone=True, silent=True) in falls_silent(router)
    asks = said("gateway-0", Inquire((("a", 0),)))
    assert router.handle(asks, NOW + 11.0) == [lost_to_owner("a", alone=True, silent=True)], "it may still turn out"
    charged = lost_to_owner("a", died=True, alone=True)
    assert router.handle(said("launcher", Died("decode-0", 1)), 2 * NOW) == [charged]
    assert router.handle(said("launcher", Died("decode-0", 1)), 2 * NOW) == []


def test_a_silent_worker_that_is_heard_again_has_ended_for_nobody() -> None:
    router = colocated("decode-0")
    submits(router, Submit(request("a")))
    falls_silent(router)
    assert lost_to_owner("a", alone=True) in router.handle(said("decode-0", beat("decode-0")), 2 * NOW)
    assert router.handle(said("launcher", Died("decode-0", 1)), 2 * NOW) == []


def test_what_becomes_of_a_silent_worker_is_not_waited_for_for_ever() -> None:
    router = colocated("decode-0")
    submits(router, Submit(request("a")))
    falls_silent(router)
    assert router.handle(said("gateway-0", Inquire((("a", 0),))), NOW + 20.0 + UNCERTAIN_S) == [lost_to_owner("a")]


def test_a_suspect_that_has_had_its_turn_goes_behind_those_that_wait() -> None:
    router = colocated("decode-0")
    submits(router, suspect("s"))
    is_closed(router, "decode-0")
    submits(router, suspect("t"))
    assert placed(submits(router, suspect("s", 3))) == [("decode-0", "t")]
    assert placed(router.handle(said("decode-0", Progress(ended=(("t", 2),))), NOW)) == [("decode-0", "s")]
