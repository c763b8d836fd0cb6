"""All figures of a run, as one tree, for tables, files and comparisons (docs/reference/figures.md defines each)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any

from alignedserve.core import ServiceClass, Usage
from alignedserve.simulator.records.distribution import percentile as percentile
from alignedserve.simulator.records.distribution import ratio
from alignedserve.simulator.records.records import RunRecord
from alignedserve.simulator.reports.paper_figures import PaperFigures
from alignedserve.simulator.reports.request_figures import BeFigures, RequestFigures, RtFigures, of_class
from alignedserve.simulator.reports.step_figures import (
    CopyFigures,
    StepFigures,
    WorkerFigures,
    mean_step_share,
    workers_of,
)


@dataclass(frozen=True, slots=True)
class SpeedFigures:
    """Of the simulator; the only ones that depend on the machine."""

    wall_s: float
    simulated_s_per_wall_s: float
    steps_per_wall_s: float

    @classmethod
    def of(cls, record: RunRecord) -> SpeedFigures:
        wall_s = record.wall_s
        return cls(wall_s, ratio(record.duration_s, wall_s), ratio(len(record.steps), wall_s))


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Shares of the KV pool's pages, on average over what it told."""

    rt: float
    be: float
    shared: float
    idle: float
    leased: float

    @classmethod
    def of(cls, told: Sequence[Usage]) -> PoolFigures:
        everything = sum(sum(astuple(one)) for one in told)
        return cls(*(ratio(sum(getattr(one, part.name) for one in told), everything) for part in fields(cls)))


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
    mean_step_share: float  # of workers: how busy they were
    workers: tuple[WorkerFigures, ...]
    papers: PaperFigures
    speed: SpeedFigures

    @classmethod
    def of(cls, record: RunRecord) -> RunFigures:
        rt, be = (of_class(record.requests, service) for service in ServiceClass)
        requests, workers = RequestFigures.of(record.requests), workers_of(record)
        return cls(
            duration_s=record.duration_s,
            tokens_per_s=ratio(requests.output_tokens, record.duration_s),
            requests=requests,
            rt=RtFigures.of(rt),
            be=BeFigures.of(be, record.duration_s),
            steps=StepFigures.of(record.steps),
            copies=CopyFigures.of(record.copies),
            pool=PoolFigures.of(record.pool),
            mean_step_share=mean_step_share(workers),
            workers=workers,
            papers=PaperFigures.of(record),
            speed=SpeedFigures.of(record),
        )

    def at(self, path: str) -> float:
        """A number of the tree by its path, such as `rt.ttft_s.p99`."""
        found: Any = self
        for name in path.split("."):
            found = getattr(found, name)
        return float(found)


def tree_of(figures: Any) -> Any:
    """As JSON can hold it: in the order of the fields, and null where there is no number."""
    if is_dataclass(figures):
        return {one.name: tree_of(getattr(figures, one.name)) for one in fields(figures)}
    if isinstance(figures, tuple):
        return [tree_of(one) for one in figures]
    if isinstance(figures, Enum):
        return figures.value
    return None if isinstance(figures, float) and not isfinite(figures) else figures
