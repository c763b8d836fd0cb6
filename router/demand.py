"""Estimate the work that there is for workers, and how near promises are to being missed, as the router sees it.

    workers   figure    is the largest of
    prefill   load      the number of workers that have a prompt
              pressure  the next chat's predicted wait for other prompts / (PILED_TTFT x its ttft);
                        the mean time that chats have waited / their ttft;
                        the predicted wait of best-effort prompts / `be_wait_s`
    decode    load      the memory that open requests will need, as predicted / the memory of a worker
              pressure  the memory that chats alone will need / the memory of all workers;
                        the share of chats whose next token is late / MOST_LATE;
                        the predicted wait of best-effort requests in the pool / `be_wait_s`

Colocated workers have a decode worker's load, and the pressures of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alignedserve.core import Request, Role, ServiceClass
from alignedserve.router.placing.admission import Admission
from alignedserve.router.placing.placement import PILED_TTFT, Placement
from alignedserve.router.sizing import Demand

MOST_LATE = 0.1  # share of the chats that decode


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that does not decode yet."""

    request: Request
    in_pool: bool
    since: float  # when the router last heard of it


@dataclass(frozen=True, slots=True)
class _Pressure:
    much: float
    why: str


def demands(
    waiting: Iterable[WaitingRequest], placement: Placement, admission: Admission, be_wait_s: float, now: float
) -> Mapping[Role, Demand]:
    prompts, handed_on = list[Request](), list[WaitingRequest]()
    for entry in waiting:
        if entry.in_pool:
            handed_on.append(entry)
        else:
            prompts.append(entry.request)
    num_prefill, num_decode = (placement.num_workers(role) for role in (Role.PREFILL, Role.DECODE))
    runs_prompts = Role.PREFILL if num_prefill else Role.DECODE
    for_prompts = _pressures_of_prompts(prompts, runs_prompts, placement, be_wait_s, now)
    for_decodes = _pressures_of_decodes(handed_on, num_decode, placement, admission, be_wait_s, now)
    of_decode_workers = for_decodes if num_prefill else [*for_prompts, *for_decodes]
    memory = placement.memory
    load = admission.memory_wanted / memory * num_decode if memory else 0.0
    return {
        Role.PREFILL: _demand(num_prefill, float(placement.num_busy(Role.PREFILL)), for_prompts),
        Role.DECODE: _demand(num_decode, load, of_decode_workers),
    }


def _demand(workers: int, load: float, pressures: Iterable[_Pressure]) -> Demand:
    most = max(pressures, key=lambda pressure: pressure.much)
    return Demand(workers, load, most.much, most.why)


def _pressures_of_prompts(
    prompts: Iterable[Request], role: Role, placement: Placement, be_wait_s: float, now: float
) -> list[_Pressure]:
    ttfts, waited, num_be = list[float](), 0.0, 0
    for request in prompts:
        if request.service is ServiceClass.RT and not request.emitted:
            ttfts.append(request.slo.ttft_s)
            waited += max(0.0, now - request.arrival_at) / request.slo.ttft_s
        num_be += request.service is ServiceClass.BE
    rt_s, be_s = (placement.least_wait_s(role, service, now) for service in (ServiceClass.RT, ServiceClass.BE))
    found = [_Pressure(be_s / be_wait_s if num_be else 0.0, f"best-effort prompts will wait {be_s:.1f} s")]
    if ttfts:
        found.append(_Pressure(rt_s / (PILED_TTFT * min(ttfts)), f"the next chat's prompt will wait {rt_s:.2f} s"))
        mean = waited / len(ttfts)
        found.append(_Pressure(mean, f"chats have waited {mean:.1f} times their ttft for a first token"))
    return found


def _pressures_of_decodes(
    handed_on: Iterable[WaitingRequest],
    num_workers: int,
    placement: Placement,
    admission: Admission,
    be_wait_s: float,
    now: float,
) -> list[_Pressure]:
    num_rt, num_late = placement.late
    num_be = 0
    for entry in handed_on:
        if entry.request.service is ServiceClass.RT:
            num_rt += 1
            num_late += now - entry.since > entry.request.slo.tbt_s
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
        found.append(_Pressure(wait_s / be_wait_s, f"best-effort requests will wait {wait_s:.0f} s in the pool"))
    return found
