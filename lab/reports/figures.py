"""Compute all figures of a run as one tree, for tables, files and comparisons.

docs/reference/figures.md defines each figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass
from enum import Enum
from math import isfinite
from operator import attrgetter
from typing import Any

from alignedserve.core import ServiceClass, Usage
from alignedserve.lab.reports.paper_figures import PaperFigures
from alignedserve.lab.reports.step_figures import (
    CopyFigures,
    StepFigures,
    WorkerFigures,
    mean_step_share,
    worker_figures,
)
from alignedserve.loads.figures.request_figures import BeFigures, RequestFigures, RtFigures, requests_of_class
from alignedserve.loads.records.distribution import percentile as percentile
from alignedserve.loads.records.distribution import ratio
from alignedserve.loads.records.records import RunRecord


@dataclass(frozen=True, slots=True)
class SpeedFigures:
    """The speed of the simulator: the only figures that depend on the machine."""

    wall_s: float
    simulated_s_per_wall_s: float
    steps_per_wall_s: float

    @classmethod
    def from_record(cls, record: RunRecord) -> SpeedFigures:
        wall_s = record.wall_s
        return cls(wall_s, ratio(record.duration_s, wall_s), ratio(len(record.steps), wall_s))


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Mean shares of the KV pool's pages, over all its usage reports."""

    rt: float
    be: float
    shared: float
    idle: float
    leased: float

    @classmethod
    def from_usages(cls, usages: Sequence[Usage]) -> PoolFigures:
        num_pages = sum(sum(astuple(usage)) for usage in usages)
        return cls(*(ratio(sum(getattr(usage, part.name) for usage in usages), num_pages) for part in fields(cls)))


@dataclass(frozen=True, slots=True)
class RunFigures:
    duration_s: float
    tokens_per_s: float  # output that reached clients
    requests: RequestFigures
    rt: RtFigures
    be: BeFigures
    steps: StepFigures
    copies: CopyFigures
    pool: PoolFigures
    mean_step_share: float  # mean over workers: how busy they were
    prompts_computed: float  # prompt tokens that steps ran ÷ those of requests that got a token
    workers: tuple[WorkerFigures, ...]
    papers: PaperFigures
    speed: SpeedFigures

    @classmethod
    def from_record(cls, record: RunRecord) -> RunFigures:
        rt, be = (requests_of_class(record.requests, service) for service in ServiceClass)
        requests, workers = RequestFigures.from_requests(record.requests), worker_figures(record)
        return cls(
            duration_s=record.duration_s,
            tokens_per_s=ratio(requests.output_tokens, record.duration_s),
            requests=requests,
            rt=RtFigures.from_requests(rt),
            be=BeFigures.from_requests(be, record.duration_s),
            steps=StepFigures.from_steps(record.steps),
            copies=CopyFigures.from_copies(record.copies),
            pool=PoolFigures.from_usages(record.pool),
            mean_step_share=mean_step_share(workers),
            prompts_computed=_prompts_computed(record),
            workers=workers,
            papers=PaperFigures.from_record(record),
            speed=SpeedFigures.from_record(record),
        )

    def at(self, path: str) -> float:
        """Return a number of the tree by its path, such as `rt.ttft_s.p99`."""
        return float(attrgetter(path)(self))


def _prompts_computed(record: RunRecord) -> float:
    asked = sum(request.num_prompt for request in record.requests if request.token_at)
    return ratio(sum(step.shape.chunk_tokens for step in record.steps), asked)


def figure_tree(figures: Any) -> Any:
    """Return the figures as JSON can hold them, in the order of the fields, with null for a missing number."""
    if is_dataclass(figures):
        return {field.name: figure_tree(getattr(figures, field.name)) for field in fields(figures)}
    if isinstance(figures, tuple):
        return [figure_tree(member) for member in figures]
    if isinstance(figures, Enum):
        return figures.value
    return None if isinstance(figures, float) and not isfinite(figures) else figures
