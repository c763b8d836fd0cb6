"""The figures of the papers, each as its paper defines it, so that their tables can be compared with ours.

"A step in SLO" (AccelGen) is one that emitted no late RT token, among steps that emitted any. Records do not say which
step made which token, only for which requests a step made one: the n-th such step of a request made its n-th token.
That is exact while no worker dies; tokens that died with one and were made again move the later ones to earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from alignedserve.core import ServiceClass
from alignedserve.simulator.records.distribution import mean, percentile, ratio, share
from alignedserve.simulator.records.records import RequestRecord, RunRecord, StepRecord
from alignedserve.simulator.reports.request_figures import (
    attains,
    finished,
    has_finished,
    in_time,
    keeps_all,
    keeps_jct,
    mean_tpot_s,
    normalised_latency_s,
    of_class,
    ttft_s,
)

_BROS_TTFT_S, _BROS_TPOT_S = 0.4, 0.2


@dataclass(frozen=True, slots=True)
class AlignedServeFigures:
    decode_tokens_per_s: float  # of all decodes of all steps, over the run
    p99_tpot_s: float  # of the seconds of steps with decodes

    @classmethod
    def of(cls, record: RunRecord) -> AlignedServeFigures:
        steps = [(step.shape.decodes, step.seconds) for step in record.steps if step.shape.decodes]
        decodes = sum(decodes for decodes, _ in steps)
        return cls(ratio(decodes, record.duration_s), percentile((seconds for _, seconds in steps), 99))


@dataclass(frozen=True, slots=True)
class BrosFigures:
    """Of RT requests, but for the last."""

    ttft_attainment: float  # at most 0.4 s
    tpot_attainment: float  # on average at most 0.2 s
    attainment: float  # both
    normalised_latency_s: float
    be_requests_per_s: float

    @classmethod
    def of(cls, record: RunRecord) -> BrosFigures:
        rt, be = (of_class(record.requests, service) for service in ServiceClass)
        return cls(
            ttft_attainment=share([_soon(request) for request in rt]),
            tpot_attainment=share([_steady(request) for request in rt]),
            attainment=share([_soon(request) and _steady(request) for request in rt]),
            normalised_latency_s=normalised_latency_s(rt),
            be_requests_per_s=ratio(len(finished(be)), record.duration_s),
        )


def _soon(request: RequestRecord) -> bool:
    return has_finished(request) and ttft_s(request) <= _BROS_TTFT_S


def _steady(request: RequestRecord) -> bool:
    """A single token has nothing to be steady with."""
    return has_finished(request) and (len(request.token_at) < 2 or mean_tpot_s(request) <= _BROS_TPOT_S)


@dataclass(frozen=True, slots=True)
class AliseFigures:
    normalised_latency_s: float  # of all requests, whatever their class


@dataclass(frozen=True, slots=True)
class AccelGenFigures:
    steps_in_slo: float
    jct_attainment: float  # of all requests, each by its own
    goodput: float  # requests in a second that keep every promise of their class
    budget_used: float  # forward size ÷ budget, mean over steps with a budget
    kv_allocated: float  # allocated ÷ total KV, mean over the seconds of steps

    @classmethod
    def of(cls, record: RunRecord) -> AccelGenFigures:
        steps, requests = record.steps, record.requests
        return cls(
            steps_in_slo=share(steps_in_slo(record)),
            jct_attainment=share([keeps_jct(request) for request in requests]),
            goodput=ratio(sum(map(keeps_all, requests)), record.duration_s),
            budget_used=mean([step.shape.tokens / step.budget for step in steps if step.budget]),
            kv_allocated=kv_allocated(steps),
        )


def kv_allocated(steps: Iterable[StepRecord]) -> float:
    """Of a worker's device, while it runs steps; of steps where somebody looked."""
    known = [(step.seconds, step.seconds * (1 - step.free_share)) for step in steps if step.free_share <= 1]
    return ratio(fsum(taken for _, taken in known), fsum(seconds for seconds, _ in known))


def steps_in_slo(record: RunRecord) -> list[bool]:
    """Of each step that emitted an RT token, whether all of those were in time; in the order of their ends."""
    tokens = {request.id: iter(in_time(request)) for request in of_class(record.requests, ServiceClass.RT)}
    held = []
    for step in _by_end(record.steps):
        emitted = [next(tokens[request], True) for request in step.emitted if request in tokens]
        if emitted:
            held.append(all(emitted))
    return held


def _by_end(steps: Sequence[StepRecord]) -> Iterable[StepRecord]:
    """As a simulation notes them; others are sorted."""
    ends = (step.began_at + step.seconds for step in steps)
    if all(one <= other for one, other in pairwise(ends)):
        return steps
    return sorted(steps, key=lambda step: (step.began_at + step.seconds, step.worker))


@dataclass(frozen=True, slots=True)
class AptServeFigures:
    """A request counts if its TTFT and its own P99 TBT hold: what attainment means here too."""

    attainment: float
    attained_per_s: float

    @classmethod
    def of(cls, rt: Sequence[RequestRecord], duration_s: float) -> AptServeFigures:
        kept = [attains(request) for request in rt]
        return cls(share(kept), ratio(sum(kept), duration_s))


@dataclass(frozen=True, slots=True)
class PaperFigures:
    alignedserve: AlignedServeFigures
    bros: BrosFigures
    alise: AliseFigures
    accelgen: AccelGenFigures
    apt_serve: AptServeFigures

    @classmethod
    def of(cls, record: RunRecord) -> PaperFigures:
        return cls(
            alignedserve=AlignedServeFigures.of(record),
            bros=BrosFigures.of(record),
            alise=AliseFigures(normalised_latency_s(record.requests)),
            accelgen=AccelGenFigures.of(record),
            apt_serve=AptServeFigures.of(of_class(record.requests, ServiceClass.RT), record.duration_s),
        )
