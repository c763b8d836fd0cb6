"""Compute the figures of the papers, each as its paper defines it, so that their tables can be compared with ours.

"A step in SLO" (AccelGen) is a step that emitted RT tokens, none of them late. Records do not say which step made which
token, only which requests got a token from a step: the n-th such step of a request made its n-th token. This is exact
while no worker dies. When a worker dies and its lost tokens are made again, later tokens are counted for earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from alignedserve.core import ServiceClass
from alignedserve.loads.figures.request_figures import (
    attains_p99,
    finished,
    has_finished,
    in_time,
    keeps_all,
    keeps_jct,
    mean_tpot_s,
    normalised_latency_s,
    requests_of_class,
    ttft_s,
)
from alignedserve.loads.records.distribution import mean, percentile, ratio, share
from alignedserve.loads.records.records import RequestRecord, RunRecord, StepRecord

_BROS_TTFT_S, _BROS_TPOT_S = 0.4, 0.2


@dataclass(frozen=True, slots=True)
class AlignedServeFigures:
    decode_tokens_per_s: float  # decodes of all steps ÷ duration of the run
    p99_tpot_s: float  # 99th percentile of the duration of steps with decodes

    @classmethod
    def from_record(cls, record: RunRecord) -> AlignedServeFigures:
        steps = [(step.shape.decodes, step.seconds) for step in record.steps if step.shape.decodes]
        decodes = sum(decodes for decodes, _ in steps)
        return cls(ratio(decodes, record.duration_s), percentile((seconds for _, seconds in steps), 99))


@dataclass(frozen=True, slots=True)
class BrosFigures:
    """Figures of BROS, over RT requests; the last figure is over BE requests."""

    ttft_attainment: float  # at most 0.4 s
    tpot_attainment: float  # on average at most 0.2 s
    attainment: float  # both
    normalised_latency_s: float
    be_requests_per_s: float

    @classmethod
    def from_record(cls, record: RunRecord) -> BrosFigures:
        rt, be = (requests_of_class(record.requests, service) for service in ServiceClass)
        return cls(
            ttft_attainment=share([_keeps_bros_ttft(request) for request in rt]),
            tpot_attainment=share([_keeps_bros_tpot(request) for request in rt]),
            attainment=share([_keeps_bros_ttft(request) and _keeps_bros_tpot(request) for request in rt]),
            normalised_latency_s=normalised_latency_s(rt),
            be_requests_per_s=ratio(len(finished(be)), record.duration_s),
        )


def _keeps_bros_ttft(request: RequestRecord) -> bool:
    return has_finished(request) and ttft_s(request) <= _BROS_TTFT_S


def _keeps_bros_tpot(request: RequestRecord) -> bool:
    """Return whether the mean TPOT is in time. A request with a single token has no TPOT, and is in time."""
    return has_finished(request) and (len(request.token_at) < 2 or mean_tpot_s(request) <= _BROS_TPOT_S)


@dataclass(frozen=True, slots=True)
class AliseFigures:
    normalised_latency_s: float  # over all requests of both classes


@dataclass(frozen=True, slots=True)
class AccelGenFigures:
    steps_in_slo: float
    jct_attainment: float  # over all requests, each against its own deadline
    goodput: float  # requests per second that keep every promise of the class
    budget_used: float  # forward size ÷ budget, mean over steps with a budget
    kv_allocated: float  # allocated ÷ total KV, mean weighted by the duration of steps

    @classmethod
    def from_record(cls, record: RunRecord) -> AccelGenFigures:
        steps, requests = record.steps, record.requests
        return cls(
            steps_in_slo=share(steps_in_slo(record)),
            jct_attainment=share([keeps_jct(request) for request in requests]),
            goodput=ratio(sum(map(keeps_all, requests)), record.duration_s),
            budget_used=mean([step.shape.tokens / step.budget for step in steps if step.budget]),
            kv_allocated=kv_allocated(steps),
        )


def kv_allocated(steps: Iterable[StepRecord]) -> float:
    """Return the share of a device's KV that is allocated during steps, over steps where it was measured."""
    known = [(step.seconds, step.seconds * (1 - step.free_share)) for step in steps if step.free_share <= 1]
    return ratio(fsum(taken for _, taken in known), fsum(seconds for seconds, _ in known))


def steps_in_slo(record: RunRecord) -> list[bool]:
    """Return for each step that emitted RT tokens whether all of them were in time, in the order of the steps' ends."""
    tokens = {request.id: iter(in_time(request)) for request in requests_of_class(record.requests, ServiceClass.RT)}
    in_slo = []
    for step in _by_end(record.steps):
        emitted = [next(tokens[request], True) for request in step.emitted if request in tokens]
        if emitted:
            in_slo.append(all(emitted))
    return in_slo


def _by_end(steps: Sequence[StepRecord]) -> Iterable[StepRecord]:
    """Return the steps in the order of their ends. Records of a simulation have this order; sort only others."""
    ends = (step.began_at + step.seconds for step in steps)
    if all(end <= following for end, following in pairwise(ends)):
        return steps
    return sorted(steps, key=lambda step: (step.began_at + step.seconds, step.worker))


@dataclass(frozen=True, slots=True)
class AptServeFigures:
    """Figures of Apt-Serve. A request attains if TTFT and the request's own P99 TBT are in time, however long one gap
    was."""

    attainment: float
    attained_per_s: float

    @classmethod
    def from_requests(cls, rt: Sequence[RequestRecord], duration_s: float) -> AptServeFigures:
        kept = [attains_p99(request) for request in rt]
        return cls(share(kept), ratio(sum(kept), duration_s))


@dataclass(frozen=True, slots=True)
class PaperFigures:
    alignedserve: AlignedServeFigures
    bros: BrosFigures
    alise: AliseFigures
    accelgen: AccelGenFigures
    apt_serve: AptServeFigures

    @classmethod
    def from_record(cls, record: RunRecord) -> PaperFigures:
        return cls(
            alignedserve=AlignedServeFigures.from_record(record),
            bros=BrosFigures.from_record(record),
            alise=AliseFigures(normalised_latency_s(record.requests)),
            accelgen=AccelGenFigures.from_record(record),
            apt_serve=AptServeFigures.from_requests(
                requests_of_class(record.requests, ServiceClass.RT), record.duration_s
            ),
        )
