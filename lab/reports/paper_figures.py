"""Compute the figures of the papers, each as its paper defines it, so that their tables can be compared with ours.

"A step in SLO" (AccelGen) is a step that emitted RT tokens, none of them late. Records do not say which step made which
token, only which requests got a token from a step: the n-th such step of a request made its n-th token. This is exact
while no worker dies. When a worker dies and its lost tokens are made again, later tokens are counted for earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import fsum
from types import SimpleNamespace as Figures

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


def paper_figures(record: RunRecord) -> Figures:
    """Return the figures of each paper. A request attains for Apt-Serve if TTFT and the request's own P99 TBT are in
    time, however long one gap was."""
    rt, be = (requests_of_class(record.requests, service) for service in ServiceClass)
    decoding, requests = [step for step in record.steps if step.shape.decodes], record.requests
    attained = [attains_p99(request) for request in rt]
    return Figures(
        alignedserve=Figures(
            decode_tokens_per_s=ratio(sum(step.shape.decodes for step in decoding), record.duration_s),
            p99_tpot_s=percentile((step.seconds for step in decoding), 99),
        ),
        bros=Figures(
            ttft_attainment=share([_keeps_bros_ttft(request) for request in rt]),
            tpot_attainment=share([_keeps_bros_tpot(request) for request in rt]),
            attainment=share([_keeps_bros_ttft(request) and _keeps_bros_tpot(request) for request in rt]),
            normalised_latency_s=normalised_latency_s(rt),
            be_requests_per_s=ratio(len(finished(be)), record.duration_s),
        ),
        alise=Figures(normalised_latency_s=normalised_latency_s(requests)),
        accelgen=Figures(
            steps_in_slo=share(steps_in_slo(record)),
            jct_attainment=share([keeps_jct(request) for request in requests]),
            goodput=ratio(sum(map(keeps_all, requests)), record.duration_s),
            budget_used=mean([step.shape.tokens / step.budget for step in record.steps if step.budget]),
            kv_allocated=kv_allocated(record.steps),
        ),
        apt_serve=Figures(
            attainment=share(attained),
            attained_per_s=ratio(sum(attained), record.duration_s),
        ),
    )


def _keeps_bros_ttft(request: RequestRecord) -> bool:
    return has_finished(request) and ttft_s(request) <= _BROS_TTFT_S


def _keeps_bros_tpot(request: RequestRecord) -> bool:
    """Return whether the mean TPOT is in time. A request with a single token has no TPOT, and is in time."""
    return has_finished(request) and (len(request.token_at) < 2 or mean_tpot_s(request) <= _BROS_TPOT_S)


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
