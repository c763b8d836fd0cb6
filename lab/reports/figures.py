"""Compute all figures of a run as one tree, for tables, files and comparisons.

docs/how/simulate.md defines each figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass
from enum import Enum
from itertools import pairwise
from math import fsum, isfinite
from operator import attrgetter
from types import SimpleNamespace as Figures
from typing import Any

from alignedserve.core import ServiceClass, Usage
from alignedserve.lab.loads.figures.request_figures import (
    RequestFigures,
    attains,
    attains_p99,
    end_to_end_s,
    finished,
    gaps_s,
    has_finished,
    has_stalled,
    in_time,
    keeps_all,
    keeps_jct,
    keeps_tbt,
    keeps_ttft,
    mean_tpot_s,
    normalised_latency_s,
    promised_in_time,
    requests_of_class,
    ttft_s,
)
from alignedserve.lab.loads.records.distribution import Distribution, mean, percentile, ratio, share
from alignedserve.lab.loads.records.records import RequestRecord, RunRecord, StepRecord
from alignedserve.lab.reports.step_figures import copy_figures, step_figures, worker_figures


@dataclass(frozen=True, slots=True)
class RunFigures:
    duration_s: float
    tokens_per_s: float  # output that reached clients
    requests: RequestFigures
    rt: Figures
    be: Figures
    steps: Figures
    copies: Figures
    pool: Figures  # mean shares of the KV pool's pages, over all its usage reports
    mean_step_share: float  # mean over workers: how busy they were
    prompts_computed: float  # prompt tokens that steps ran ÷ those of requests that got a token
    workers: tuple[Figures, ...]
    papers: Figures
    speed: Figures  # of the simulator: the only figures that depend on the machine

    @classmethod
    def from_record(cls, record: RunRecord) -> RunFigures:
        rt, be = (requests_of_class(record.requests, service) for service in ServiceClass)
        requests, workers = RequestFigures.from_requests(record.requests), worker_figures(record)
        asked = sum(request.num_prompt for request in record.requests if request.token_at)
        return cls(
            duration_s=record.duration_s,
            tokens_per_s=ratio(requests.output_tokens, record.duration_s),
            requests=requests,
            rt=_rt(rt),
            be=_be(be, record.duration_s),
            steps=step_figures(record.steps),
            copies=copy_figures(record.copies),
            pool=_pool(record.pool),
            mean_step_share=mean([worker.step_share for worker in workers]),
            prompts_computed=ratio(sum(step.shape.chunk_tokens for step in record.steps), asked),
            workers=workers,
            papers=paper_figures(record),
            speed=_speed(record),
        )

    def at(self, path: str) -> float:
        """Return a number of the tree by its path, such as `rt.ttft_s.p99`."""
        return float(attrgetter(path)(self))


def _rt(requests: Sequence[RequestRecord]) -> Figures:
    begun = [request for request in requests if request.token_at]
    timed = [is_in_time for request in requests for is_in_time in promised_in_time(request)]
    return Figures(
        requests=RequestFigures.from_requests(requests),
        attainment=share([attains(request) for request in requests]),
        ttft_attainment=share([keeps_ttft(request) for request in requests]),
        tbt_attainment=share([keeps_tbt(request) for request in requests]),
        p99_attainment=share([attains_p99(request) for request in requests]),
        stalled=share([has_stalled(request) for request in requests]),
        tokens_in_time=share(timed),
        ttft_s=Distribution.from_values(map(ttft_s, begun)),
        tbt_s=Distribution.from_values(gap for request in begun for gap in gaps_s(request)),
        mean_tpot_s=Distribution.from_values(mean_tpot_s(request) for request in begun if len(request.token_at) > 1),
        end_to_end_s=Distribution.from_values(map(end_to_end_s, finished(requests))),
    )


def _be(requests: Sequence[RequestRecord], duration_s: float) -> Figures:
    """Return the figures of best-effort requests. Rates are over the whole run, including the drain at its end."""
    done = finished(requests)
    return Figures(
        requests=RequestFigures.from_requests(requests),
        tokens_per_s=ratio(sum(len(request.token_at) for request in done), duration_s),
        requests_per_s=ratio(len(done), duration_s),
        jct_attainment=share([keeps_jct(request) for request in requests]),
        jct_s=Distribution.from_values(map(end_to_end_s, done)),
    )


def _pool(usages: Sequence[Usage]) -> Figures:
    num_pages = sum(sum(astuple(usage)) for usage in usages)
    shown = ("rt", "be", "shared", "idle", "leased")
    return Figures(**{part: ratio(sum(getattr(usage, part) for usage in usages), num_pages) for part in shown})


def _speed(record: RunRecord) -> Figures:
    wall_s = record.wall_s
    simulated, steps = ratio(record.duration_s, wall_s), ratio(len(record.steps), wall_s)
    return Figures(wall_s=wall_s, simulated_s_per_wall_s=simulated, steps_per_wall_s=steps)


def figure_tree(figures: Any) -> Any:
    """Return the figures as JSON can hold them, in the order of the fields, with null for a missing number."""
    if is_dataclass(figures):
        return {field.name: figure_tree(getattr(figures, field.name)) for field in fields(figures)}
    if isinstance(figures, Figures):
        return {name: figure_tree(value) for name, value in vars(figures).items()}
    if isinstance(figures, tuple):
        return [figure_tree(member) for member in figures]
    if isinstance(figures, Enum):
        return figures.value
    return None if isinstance(figures, float) and not isfinite(figures) else figures


# --- The figures of the papers


_BROS_TTFT_S, _BROS_TPOT_S = 0.4, 0.2


def paper_figures(record: RunRecord) -> Figures:
    """Return the figures of each paper, as the paper defines it, so that its tables can be compared with ours.

    A request attains for Apt-Serve if TTFT and the request's own P99 TBT are in time, however long one gap was. "A step
    in SLO" (AccelGen) is a step that emitted RT tokens, none of them late. Records do not say which step made which
    token, only which requests got a token from a step: the n-th such step of a request made its n-th token. This is
    exact while no worker dies. When a worker dies and its lost tokens are made again, later tokens are counted for
    earlier steps.
    """
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
