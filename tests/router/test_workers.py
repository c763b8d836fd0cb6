"""Workers that come and go: a retiring worker gets nothing new; the number of workers that is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.config.topology import Range
from alignedserve.core import Role
from alignedserve.protocol.commands import Command, Scale, Send
from alignedserve.protocol.events import TimerFired
from alignedserve.protocol.figures import ByClass, Stages
from alignedserve.protocol.messages import (
    Backlog,
    Died,
    Figures,
    Heartbeat,
    Holding,
    Missed,
    Progress,
    Retire,
    Submit,
)
from alignedserve.router.sizing import Sizes
from tests.router.routers import (
    LIMITS,
    RECOVERED_AT,
    A,
    beat,
    lost_to_owner,
    placed,
    recovering,
    sent,
    serving,
    submit,
)
from tests.samples import member, request, said


def test_a_worker_that_retires_gets_nothing_new() -> None:
    router = serving()
    retire = Retire("prefill-0", 1)
    assert router.handle(said("launcher", Retire("prefill-0", 7)), RECOVERED_AT) == [], "of another life"
    assert router.handle(said("launcher", retire), RECOVERED_AT) == [Send("prefill-0", retire)]
    for name in "abc":
        told = router.handle(said("gateway-0", Submit(request(name))), RECOVERED_AT)
        assert placed(told) == [("prefill-1", name)]


def test_prompts_wait_where_all_workers_retire_until_another_comes() -> None:
    router = serving()
    for name in ("prefill-0", "prefill-1"):
        router.handle(said("launcher", Retire(name, 1)), RECOVERED_AT)
    assert router.handle(said("gateway-0", Submit(A)), RECOVERED_AT) == []
    met = router.handle(said("prefill-2", beat("prefill-2")), RECOVERED_AT)
    assert placed(met) == [("prefill-2", "a")]


def test_the_last_decode_worker_of_a_node_takes_what_is_in_its_pool_along() -> None:
    """No other worker may read that pool: its requests, and later arrivals, start again on another node."""
    router = recovering(("gateway-0", "prefill-0"))
    for name in ("pool-0", "decode-0"):
        router.handle(said(name, beat(name)), 1.5)
    for name in ("pool-1", "decode-1"):
        router.handle(said(name, Heartbeat(replace(member(name), node="other"))), 1.5)
    router.handle(TimerFired("recovered"), RECOVERED_AT)
    submit(router, "a", "b")
    router.handle(said("pool-1", Progress(committed=(("a", 0),))), 3.1)
    told = router.handle(said("launcher", Retire("decode-1", 1)), 3.2)
    assert told[0] == Send("decode-1", Retire("decode-1", 1))
    assert lost_to_owner("a") in told
    assert lost_to_owner("b") in router.handle(said("pool-1", Progress(committed=(("b", 0),))), 3.3)
    router.handle(said("decode-1", Heartbeat(replace(member("decode-1", 2), node="other"))), 3.4)
    submit(router, "c")
    assert router.handle(said("pool-1", Progress(committed=(("c", 0),))), 3.5) == [], "there is another"


def test_a_pool_whose_decode_workers_stay_away_is_left() -> None:
    """Its requests would wait for a worker that may never come back, while other nodes have room."""
    router = recovering(("gateway-0", "prefill-0", "pool-0", "decode-0"))
    for name in ("pool-1", "decode-1"):
        router.handle(said(name, Heartbeat(replace(member(name), node="other"))), 1.5)
    router.handle(TimerFired("recovered"), RECOVERED_AT)
    submit(router, "a", "b")
    router.handle(said("pool-1", Progress(committed=(("a", 0),))), 3.1)
    router.handle(said("launcher", Died("decode-1", 1)), 3.2)
    assert lost_to_owner("a") not in router.handle(TimerFired("refresh"), 5.0), "it may be back soon"
    assert lost_to_owner("a") in router.handle(TimerFired("refresh"), 10.0)
    assert lost_to_owner("b") in router.handle(said("pool-1", Progress(committed=(("b", 0),))), 10.1)
    router.handle(said("decode-1", Heartbeat(replace(member("decode-1", 2), node="other"))), 11.0)
    submit(router, "c")
    router.handle(said("pool-1", Progress(committed=(("c", 0),))), 11.1)
    router.handle(said("launcher", Died("decode-1", 2)), 12.0)
    router.handle(said("launcher", Died("decode-0", 1)), 12.0)
    for at in (15.0, 20.0):
        assert lost_to_owner("c") not in router.handle(TimerFired("refresh"), at), "no other node is better"


def test_a_new_router_hears_of_those_that_retire() -> None:
    router = recovering()
    router.handle(said("prefill-0", Holding((), is_retiring=True)), 1.5)
    router.handle(TimerFired("recovered"), RECOVERED_AT)
    for name in "abc":
        told = router.handle(said("gateway-0", Submit(request(name))), RECOVERED_AT)
        assert placed(told) == [("prefill-1", name)]


def test_a_worker_that_may_not_have_heard_that_it_retires_is_told_again() -> None:
    router = serving()
    retire = Retire("prefill-0", 1)
    router.handle(said("launcher", retire), 3.0)
    assert Send("prefill-0", retire) in router.handle(said("prefill-0", Missed()), 3.1)
    assert Send("prefill-1", retire) not in router.handle(said("prefill-1", Missed()), 3.1)


def test_gateways_hear_each_second_where_requests_are() -> None:
    router = serving()

    def shown(at: float) -> list[Figures]:
        return [figures for _, figures in sent(router.handle(TimerFired("look"), at), Figures)]

    assert shown(3.0) == [Figures(rebuilt_s=RECOVERED_AT, rt=Stages(), be=Stages(), member="router")]
    submit(router, "a", "b")
    router.handle(said("pool-0", Progress(committed=(("a", 0),))), 3.1)
    told = Figures(rebuilt_s=RECOVERED_AT, rt=Stages(prefill=1, pool=1), be=Stages(), member="router")
    assert shown(4.0) == [told]
    assert shown(5.0) == [told], "a router that is silent is away"
    router.handle(said("gateway-1", beat("gateway-1")), 5.5)
    assert len(shown(6.0)) == 2
    router.handle(said("launcher", Died("pool-0", 1)), 6.5)
    assert [figures.lost for figures in shown(7.0)] == [ByClass(rt=1)] * 2, "the pool had a"


@pytest.mark.parametrize("is_recovered", [True, False])
def test_as_many_workers_are_asked_for_as_the_load_takes(is_recovered: bool) -> None:
    """A new router does not know the load before it has heard of all requests."""
    sizes = Sizes({Role.PREFILL: Range(1, 4), Role.DECODE: Range(1, 4)}, grow_after_s=2)
    start = serving if is_recovered else recovering
    router = start(("gateway-0", "pool-0", "prefill-0", "decode-0"), replace(LIMITS, sizes=sizes))
    standing = said("prefill-0", Progress(backlog=Backlog(3.0, 0.001, 0.6, 0.001, 0.001)))
    submit(router, "a", now=2.5)

    def asked(at: float) -> list[Command]:
        router.handle(standing, at)  # as many prompts have come as have run
        return [command for command in router.handle(TimerFired("look"), at) if isinstance(command, Scale)]

    assert asked(3.0) == asked(4.0) == []
    if not is_recovered:
        assert asked(5.0) == []
        return
    [scale] = asked(5.0)
    assert isinstance(scale, Scale)
    assert (scale.prefill, scale.decode) == (2, None)
    assert scale.why.startswith("prefill: ")
