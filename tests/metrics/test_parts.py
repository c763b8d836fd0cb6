"""Figures of a pool and of workers reach /metrics: through the router and a gateway's owner."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest

from alignedserve.config.choices import MetricsPrefix
from alignedserve.core import PreemptionCause, Role, ServiceClass, Usage
from alignedserve.metrics.parts import PartMetrics
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.metrics.series import merge
from alignedserve.owner.core import OwnerCore
from alignedserve.protocol.commands import Send, Show
from alignedserve.protocol.events import TimerFired
from alignedserve.protocol.figures import (
    STEP_S,
    STEP_TOKENS,
    ByClass,
    DecodeSteps,
    Garbage,
    GpuFigures,
    MachineFigures,
    Preempted,
    ProcessFigures,
    Stages,
    Tally,
    WorkerLoad,
)
from alignedserve.protocol.messages import Figures, Heartbeat, Member
from alignedserve.protocol.roads import Endpoint
from alignedserve.router.state import RouterCore, RouterLimits
from tests.exposition import value
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
    later = router.handle(said("gateway-2", Heartbeat(member("gateway-2"))), 1.3)
    assert named in [command.message for command in later if isinstance(command, Send) and command.to == "gateway-2"]


def test_the_owner_has_them_shown() -> None:
    figures = Figures(USAGE, member="pool-0")
    assert OwnerCore(frozenset({Role.ROUTER})).handle(said("router", figures), 0.0) == [Show(figures)]


def text_of(metrics: PartMetrics) -> str:
    return merge(metrics.blocks())


def shown(metrics: PartMetrics, start: str) -> float:
    return value(text_of(metrics), f"alignedserve:{start}")


def test_pages_are_shown_by_what_they_are_now() -> None:
    metrics = PartMetrics()
    metrics.update(Figures(Usage(free=21), member="pool-0"))
    metrics.update(Figures(USAGE, member="pool-0"))
    states = {"rt": 3, "be": 2, "shared": 1, "idle": 4, "leased": 5, "free": 6}
    assert {state: shown(metrics, f'kv_pool_pages{{pool="pool-0",state="{state}"}}') for state in states} == states


def test_what_became_int8_and_what_could_not_are_counted_for_each_pool() -> None:
    metrics = PartMetrics()
    metrics.update(Figures(USAGE, num_compressed=5, member="pool-0"))
    metrics.update(Figures(USAGE, num_compressed=8, num_incompressible=2, member="pool-0"))
    assert shown(metrics, 'kv_pages_compressed_total{pool="pool-0"}') == 8
    assert shown(metrics, 'kv_pages_incompressible_total{pool="pool-0"}') == 2


def test_what_ran_together_in_a_worker_s_steps_is_counted() -> None:
    metrics = PartMetrics()
    load = WorkerLoad()
    metrics.update(Figures(steps=DecodeSteps((1, 2, 0), Tally((3, 0, 0, 0, 0, 0), 40)), worker=load, member="decode-0"))
    spread = Tally((6, 1, 0, 0, 0, 1), 20_340)
    steps = DecodeSteps((1, 5, 2), spread, switches=2, prefetched=4, in_vain=1, held_back=9, pauses=3, grouped=6)
    metrics.update(Figures(steps=steps, slowdown=1.25, worker=load, member="decode-0"))
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
    assert shown(metrics, f"be_tokens_held_back_total{{{of_worker}}}") == 9
    assert shown(metrics, f"step_pauses_total{{{of_worker}}}") == 3
    assert shown(metrics, f"decode_steps_grouped_total{{{of_worker}}}") == 6


@pytest.mark.parametrize("lends", [False, True])
def test_the_road_of_each_pair_is_named(lends: bool) -> None:
    near, far = (Endpoint("10.0.0.1:1", gpu, frozenset({"c"} if gpu == "a" else ())).pack() for gpu in "ab")
    role = Role.DECODE if lends else Role.PREFILL
    members = [
        Member("prefill-0", role, "n0", 1, "", near, lends=lends),
        Member("prefill-1", role, "n0", 1, "", far, lends=lends),
        Member("prefill-2", role, "n1", 1, "", near, lends=lends),
        Member("decode-0", Role.DECODE, "n0", 1, "", Endpoint("10.0.0.1:1", "c", frozenset("ab")).pack()),
    ]
    metrics = PartMetrics(members=lambda: members)
    assert shown(metrics, 'kv_road{decode="decode-0",prefill="prefill-0",road="ipc"}') == 1
    assert shown(metrics, 'kv_road{decode="decode-0",prefill="prefill-1",road="host"}') == 1
    assert "prefill-2" not in text_of(metrics), "no road leads from another node"
    assert 'decode="prefill-' not in text_of(metrics), "a prefill worker that decodes too stands at its own end"


LOAD = WorkerLoad(
    running=ByClass(rt=3, be=5),
    waiting=ByClass(be=2),
    used=0.625,
    slack_s=-0.25,
    step_tokens=Tally((0, 4) + (0,) * (len(STEP_TOKENS) - 2) + (1,), 20_032),
    step_s=Tally((0,) * len(STEP_S) + (2,), 31.5),
    preempted=(Preempted(PreemptionCause.REAL_TIME, ServiceClass.BE, keeps_kv=True, number=4),),
)


def test_what_a_worker_has_and_what_its_steps_take_is_shown_under_vllm_s_names() -> None:
    metrics = PartMetrics(prefix=MetricsPrefix.VLLM)
    metrics.update(Figures(worker=LOAD, member="prefill-1"))
    exposed = text_of(metrics)
    worker = 'worker="prefill-1"'
    assert value(exposed, f'vllm:num_requests_running{{class="be",{worker}}}') == 5
    assert value(exposed, f'vllm:num_requests_waiting{{class="rt",{worker}}}') == 0
    assert value(exposed, f"vllm:kv_cache_usage_perc{{{worker}}}") == 0.625
    assert value(exposed, f'vllm:iteration_tokens_total_bucket{{le="8.0",{worker}}}') == 4
    assert value(exposed, f"vllm:iteration_tokens_total_count{{{worker}}}") == 5
    assert value(exposed, f"vllm:iteration_time_seconds_sum{{{worker}}}") == 31.5
    assert value(exposed, f"vllm:slack_seconds{{{worker}}}") == -0.25
    assert value(exposed, f'vllm:num_preemptions_total{{cause="real_time",class="be",kv="kept",{worker}}}') == 4


def test_counts_that_alert_begin_at_0() -> None:
    """An increase from nothing to 1 is none to Prometheus."""
    metrics = PartMetrics()
    metrics.update(Figures(worker=LOAD, member="decode-0"))
    for counter in ("kv_copies_refused_total", "kv_transfers_failed_total"):
        assert value(text_of(metrics), f'alignedserve:{counter}{{worker="decode-0"}}') == 0


def test_there_is_no_slack_where_nothing_is_due() -> None:
    metrics = PartMetrics()
    metrics.update(Figures(worker=replace(LOAD, slack_s=None), member="decode-0"))
    assert "slack_seconds{" not in text_of(metrics)


def test_a_worker_or_a_pool_that_has_left_is_shown_no_more() -> None:
    """Else it would seem to have the same requests for ever."""
    there: list[Member] = [member("decode-0"), member("decode-1"), member("pool-0")]
    metrics = PartMetrics(members=lambda: there)
    for name in ("decode-0", "decode-1"):
        metrics.update(Figures(worker=LOAD, member=name))
    metrics.update(Figures(USAGE, member="pool-0"))
    there[:] = [member("decode-1")]
    exposed = text_of(metrics)
    assert value(exposed, 'alignedserve:num_requests_running{class="rt",worker="decode-1"}') == 3
    assert "decode-0" not in exposed
    assert "pool-0" not in exposed


def test_what_an_earlier_life_told_is_not_shown_of_the_next() -> None:
    there = [member("decode-0")]
    metrics = PartMetrics(members=lambda: there)
    metrics.update(Figures(worker=LOAD, num_refused=4, member="decode-0"))
    there[:] = [member("decode-0", 2)]
    assert "decode-0" not in text_of(metrics)
    metrics.update(Figures(worker=WorkerLoad(), num_refused=1, member="decode-0"))
    assert shown(metrics, 'kv_copies_refused_total{worker="decode-0"}') == 1


def test_gateways_that_started_at_other_times_show_the_same() -> None:
    early, late = PartMetrics(), PartMetrics()
    for number in range(3):
        told = Figures(worker=LOAD, num_refused=number, steps=DecodeSteps((number, 0, 0)), member="decode-0")
        early.update(told)
    late.update(told)
    assert text_of(early) == text_of(late)


def test_processes_of_parts_are_shown_beside_those_of_owners() -> None:
    metrics = PartMetrics()
    process = ProcessFigures(cpu_s=12.5, resident_bytes=1 << 30, num_files=9, started_at=1.7e9)
    metrics.update(Figures(USAGE, process=process, member="pool-0"))
    exposed = merge([*RequestMetrics(part="gateway-0").blocks(), *metrics.blocks()])
    assert value(exposed, 'process_cpu_seconds_total{part="pool-0"}') == 12.5
    assert value(exposed, 'process_resident_memory_bytes{part="pool-0"}') == 1 << 30
    assert value(exposed, 'process_open_fds{part="gateway-0"}') > 0
    assert exposed.count("# TYPE process_cpu_seconds_total") == 1


def test_a_machine_is_shown_once_and_what_its_driver_does_not_tell_is_absent() -> None:
    metrics = PartMetrics(members=lambda: [member("decode-0"), member("prefill-0")])
    gpus = GpuFigures(0.5, 10, 20), GpuFigures(None, None, 20)
    process = ProcessFigures(1.0, 1, 1, 1.7e9, machine=MachineFigures(1.5, 4, 3, 8, gpus))
    for part in ("decode-0", "prefill-0"):
        metrics.update(Figures(process=process, member=part))
    node = member("decode-0").node
    assert shown(metrics, f'node_cores_busy{{node="{node}"}}') == 1.5
    assert shown(metrics, f'gpu_busy{{gpu="0",node="{node}"}}') == 0.5
    text = text_of(metrics)
    assert text.count("alignedserve:gpu_busy{") == 1, "of the GPU that tells it"
    assert text.count("alignedserve:gpu_memory_bytes{") == 2


def test_a_part_that_fell_idle_at_its_first_reading_hides_no_machine() -> None:
    metrics, node = PartMetrics(members=lambda: [member("decode-0"), member("prefill-0")]), member("decode-0").node
    for busy, part in ((1.5, "decode-0"), (None, "prefill-0"), (0.5, "decode-0")):
        process = ProcessFigures(1.0, 1, 1, 1.7e9, machine=MachineFigures(busy, 4, 3, 8))
        metrics.update(Figures(process=process, member=part))
        assert shown(metrics, f'node_cores_busy{{node="{node}"}}') == (busy or 1.5)
    metrics.update(Figures(process=replace(process, machine=MachineFigures(2.5, 4, 3, 8)), member="prefill-0"))
    assert shown(metrics, f'node_cores_busy{{node="{node}"}}') == 2.5


def test_python_s_own_figures_are_shown_of_each_part() -> None:
    metrics, garbage = PartMetrics(), (Garbage(7, 100, 0), Garbage(3, 50, 1))
    process = ProcessFigures(1.0, 1, 1, 1.7e9, python="3.12.3", garbage=garbage)
    metrics.update(Figures(USAGE, process=process, member="pool-0"))
    exposed = merge([*RequestMetrics(part="gateway-0").blocks(), *metrics.blocks()])
    assert value(exposed, 'python_info{part="pool-0",version="3.12.3"}') == 1
    assert value(exposed, 'python_gc_collections_total{generation="0",part="pool-0"}') == 7
    assert value(exposed, 'python_gc_objects_collected_total{generation="1",part="pool-0"}') == 50
    assert value(exposed, 'python_gc_objects_uncollectable_total{generation="1",part="pool-0"}') == 1
    assert value(exposed, f'python_info{{part="gateway-0",version="{platform.python_version()}"}}') == 1
    assert value(exposed, 'python_gc_collections_total{generation="0",part="gateway-0"}') > 0


def test_requests_that_lost_their_place_are_counted() -> None:
    metrics = PartMetrics()
    lost = ByClass(rt=1)
    metrics.update(Figures(rt=Stages(), be=Stages(), returned=ByClass(be=5), lost=lost, member="router"))
    assert shown(metrics, 'request_replacements_total{class="be",reason="returned"}') == 5
    assert shown(metrics, 'request_replacements_total{class="rt",reason="lost"}') == 1
