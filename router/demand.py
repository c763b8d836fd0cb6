"""What there is to do for workers, and how near what was promised is to being missed, as the router sees it.

    prefill workers   load      those that have a prompt
                      pressure  of chats the next one's predicted wait for other prompts, of PILED_TTFT of its ttft, and
                                what they have waited, of their ttft; of best-effort prompts the predicted wait, of
                                `be_wait_s`
    decode workers    load      memory that open requests want, as predicted, in workers' memory
                      pressure  what chats alone want of it, of all there is; the share of chats whose next token is
                                late, of MOST_LATE; of best-effort requests in the pool the predicted wait

Colocated workers have a decode worker's load, and the pressure of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alignedserve.core import Request, Role, ServiceClass
from alignedserve.router.placing.admission import Admission
from alignedserve.router.placing.placement import PILED_TTFT, Placement
from alignedserve.router.sizing import Demand

MOST_LATE = 0.1  # of the chats that decode


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request before its decodes."""

    request: Request
    in_pool: bool
    since: float  # when it was last heard of


@dataclass(frozen=True, slots=True)
class _Pressure:
    much: float
    why: str


def demands(
    waiting: Iterable[Waiting], placement: Placement, admission: Admission, be_wait_s: float, now: float
) -> Mapping[Role, Demand]:
    prompts, handed_on = list[Request](), list[Waiting]()
    for one in waiting:
        if one.in_pool:
            handed_on.append(one)
        else:
            prompts.append(one.request)
    num_prefill, num_decode = (placement.num_workers(role) for role in (Role.PREFILL, Role.DECODE))
    runs_prompts = Role.PREFILL if num_prefill else Role.DECODE
    for_prompts = _of_prompts(prompts, runs_prompts, placement, be_wait_s, now)
    for_decodes = _of_decodes(handed_on, num_decode, placement, admission, be_wait_s, now)
    of_decode = for_decodes if num_prefill else [*for_prompts, *for_decodes]
    memory = placement.memory
    load = admission.memory_wanted / memory * num_decode if memory else 0.0
    return {
        Role.PREFILL: _demand(num_prefill, float(placement.num_busy(Role.PREFILL)), for_prompts),
        Role.DECODE: _demand(num_decode, load, of_decode),
    }


def _demand(workers: int, load: float, pressures: Iterable[_Pressure]) -> Demand:
    most = max(pressures, key=lambda one: one.much)
    return Demand(workers, load, most.much, most.why)


def _of_prompts(
    prompts: Iterable[Request], role: Role, placement: Placement, be_wait_s: float, now: float
) -> list[_Pressure]:
    ttfts, waited, num_be = list[float](), 0.0, 0
    for request in prompts:
        if request.service is ServiceClass.RT and not request.emitted:
            ttfts.append(request.slo.ttft_s)
            waited += max(0.0, now - request.arrival_at) / request.slo.ttft_s
        num_be += request.service is ServiceClass.BE
    rt_s, be_s = (placement.least_wait_s(role, service) for service in (ServiceClass.RT, ServiceClass.BE))
    found = [_Pressure(be_s / be_wait_s if num_be else 0.0, f"best-effort prompts are to wait {be_s:.1f} s")]
    if ttfts:
        found.append(_Pressure(rt_s / (PILED_TTFT * min(ttfts)), f"the next chat's prompt is to wait {rt_s:.2f} s"))
        mean = waited / len(ttfts)
        found.append(_Pressure(mean, f"chats have waited {mean:.1f} times their ttft for a first token"))
    return found


def _of_decodes(
    handed_on: Iterable[Waiting],
    num_workers: int,
    placement: Placement,
    admission: Admission,
    be_wait_s: float,
    now: float,
) -> list[_Pressure]:
    num_rt, num_late = placement.late
    num_be = 0
    for one in handed_on:
        if one.request.service is ServiceClass.RT:
            num_rt += 1
            num_late += now - one.since > one.request.slo.tbt_s
        else:
            num_be += 1
    share = num_late / num_rt if num_rt else 0.0
    found = [_Pressure(share / MOST_LATE, f"{num_late} of {num_rt} chats are late with their next token")]
    if placement.memory:
        wanted = admission.rt_memory_wanted / placement.memory
        found.append(_Pressure(wanted, f"chats want {wanted:.0%} of the memory of {num_workers} workers"))
    rate = admission.ends_per_s(now)
    if num_be and rate:
        wait_s = num_be / rate
        found.append(_Pressure(wait_s / be_wait_s, f"best-effort requests are to wait {wait_s:.0f} s in the pool"))
    return found
