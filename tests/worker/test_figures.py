"""Figures of a pool and of workers reach /metrics: through the router and a gateway's owner."""

from __future__ import annotations

from alignedserve.core import Role, Usage
from alignedserve.gateway.http.metrics import Metrics
from alignedserve.owner.core import OwnerCore
from alignedserve.protocol.commands import Send, Show
from alignedserve.protocol.events import TimerFired
from alignedserve.protocol.messages import DecodeSteps, Figures, Heartbeat
from alignedserve.router.state import RouterCore, RouterLimits
from tests.samples import ROUTER_MEMBER, member, said

USAGE = Usage(rt=3, be=2, shared=1, idle=4, leased=5, free=6)


def test_the_router_hands_figures_to_every_gateway_and_names_their_worker() -> None:
    router = RouterCore(ROUTER_MEMBER, RouterLimits(most_open=4, heartbeat_s=0.5, death_s=3.0), 0.0)
    for name in ("gateway-0", "gateway-1", "pool-0"):
        router.handle(said(name, Heartbeat(member(name))), 0.1)
    router.handle(TimerFired("gathered"), 1.0)
    named = Figures(USAGE, member="pool-0")
    assert router.handle(said("pool-0", Figures(USAGE)), 1.1) == [Send("gateway-0", named), Send("gateway-1", named)]
    assert router.handle(said("pool-0", Figures(USAGE), incarnation=7), 1.2) == [], "of a life that is not there"


def test_the_owner_has_them_shown() -> None:
    figures = Figures(USAGE, member="pool-0")
    assert OwnerCore(frozenset({Role.ROUTER})).handle(said("router", figures), 0.0) == [Show(figures)]


def shown(metrics: Metrics, start: str) -> float:
    lines = metrics.series_of_parts().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"alignedserve:{start}")).rsplit(" ", 1)[1])


def test_pages_are_shown_by_what_they_are_now() -> None:
    metrics = Metrics()
    metrics.update_parts(Figures(Usage(free=21), member="pool-0"))
    metrics.update_parts(Figures(USAGE, member="pool-0"))
    states = {"rt": 3, "be": 2, "shared": 1, "idle": 4, "leased": 5, "free": 6}
    assert {state: shown(metrics, f'kv_pool_pages{{pool="pool-0",state="{state}"}}') for state in states} == states


def test_what_became_int8_and_what_could_not_are_counted_for_each_pool() -> None:
    metrics = Metrics()
    metrics.update_parts(Figures(USAGE, num_compressed=5, member="pool-0"))
    metrics.update_parts(Figures(USAGE, num_compressed=8, num_incompressible=2, member="pool-0"))
    assert shown(metrics, 'kv_pages_compressed_total{pool="pool-0"}') == 8
    assert shown(metrics, 'kv_pages_incompressible_total{pool="pool-0"}') == 2


def test_what_ran_together_in_a_worker_s_steps_is_counted() -> None:
    metrics = Metrics()
    metrics.update_parts(Figures(steps=DecodeSteps((1, 2, 0), (3, 0, 0, 0, 0, 0), 40), member="decode-0"))
    steps = DecodeSteps((1, 5, 2), (6, 1, 0, 0, 0, 1), 20_340, switches=2, prefetched=4, in_vain=1)
    metrics.update_parts(Figures(steps=steps, slowdown=1.25, member="decode-0"))
    of_worker = 'worker="decode-0"'
    by_batches = {
        batches: shown(metrics, f'decode_steps_total{{batches="{batches}",{of_worker}}}')
        for batches in ("0", "1", "2+")
    }
    assert by_batches == {"0": 1, "1": 5, "2+": 2}
    assert shown(metrics, f'decode_step_spread_tokens_bucket{{le="256.0",{of_worker}}}') == 7
    assert shown(metrics, f'decode_step_spread_tokens_bucket{{le="+Inf",{of_worker}}}') == 8
    assert shown(metrics, f"decode_step_spread_tokens_sum{{{of_worker}}}") == 20_340
    assert shown(metrics, f"step_slowdown{{{of_worker}}}") == 1.25
    assert shown(metrics, f"batch_switches_total{{{of_worker}}}") == 2
    assert shown(metrics, f'kv_prefetches_total{{outcome="used",{of_worker}}}') == 4
    assert shown(metrics, f'kv_prefetches_total{{outcome="wasted",{of_worker}}}') == 1


def test_a_count_goes_on_where_a_worker_s_next_life_begins_anew() -> None:
    metrics = Metrics()
    for num_refused in (1, 1, 4, 2):
        metrics.update_parts(Figures(num_refused=num_refused, member="decode-0"))
    assert shown(metrics, 'kv_copies_refused_total{worker="decode-0"}') == 4 + 2
