"""Run the same preset at several rates, and find its effective throughput: the highest rate at which it attains a mark.

That rate lies between the highest measured rate with enough attainment and the next rate, on the straight line between
them. If even the highest measured rate attains, it is a lower bound. If no measured rate attains, there is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.lab.reports.comparison import Cell
from alignedserve.lab.reports.figures import figure_tree
from alignedserve.lab.reports.trial import TrialRun, by_preset, by_rate
from alignedserve.loads.figures.units import Unit
from alignedserve.loads.records.distribution import NOTHING

MARKS = (0.9, 0.6)  # of attainment (Apt-Serve)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The figures of a preset at one rate, over the seeds."""

    rate: float
    attainment: Cell
    normalised_latency_s: Cell  # ALISE plots it against the rate


@dataclass(frozen=True, slots=True)
class EffectiveThroughput:
    mark: float
    rate: float
    is_lower_bound: bool = False  # the highest measured rate still attains

    def __str__(self) -> str:
        return f"{'at least ' if self.is_lower_bound else ''}{Unit.PER_SECOND.show(self.rate)}"


@dataclass(frozen=True, slots=True)
class Sweep:
    preset: str
    points: tuple[SweepPoint, ...]  # from the lowest rate
    effective: tuple[EffectiveThroughput, ...]  # one entry for each mark


def sweeps(runs: Sequence[TrialRun]) -> tuple[Sweep, ...]:
    """Return a sweep for each preset, from runs that differ only in preset, rate and seed."""
    return tuple(_sweep(preset, of_preset) for preset, of_preset in by_preset(runs).items())


def _sweep(preset: str, runs: Sequence[TrialRun]) -> Sweep:
    points = tuple(_point(rate, at_rate) for rate, at_rate in by_rate(runs) if rate is not None)
    return Sweep(preset, points, tuple(effective_throughput(points, mark) for mark in MARKS))


def _point(rate: float, runs: Sequence[TrialRun]) -> SweepPoint:
    return SweepPoint(
        rate,
        Cell.from_values([run.figures.rt.attainment for run in runs]),
        Cell.from_values([run.figures.papers.alise.normalised_latency_s for run in runs]),
    )


def effective_throughput(points: Sequence[SweepPoint], mark: float) -> EffectiveThroughput:
    attaining = [number for number, point in enumerate(points) if point.attainment.mean >= mark]
    if not attaining:
        return EffectiveThroughput(mark, NOTHING)
    last = points[attaining[-1]]
    if last is points[-1]:
        return EffectiveThroughput(mark, last.rate, is_lower_bound=True)
    return EffectiveThroughput(mark, _crossing(last, points[attaining[-1] + 1], mark))


def _crossing(above: SweepPoint, below: SweepPoint, mark: float) -> float:
    fall = above.attainment.mean - below.attainment.mean
    if fall != fall:
        return above.rate
    return above.rate + (below.rate - above.rate) * (above.attainment.mean - mark) / fall


def sweep_table(found: Sequence[Sweep]) -> list[list[str]]:
    shown = [
        [f"{point.rate:g}/s", *(_attainment(sweep.points[number]) for sweep in found)]
        for number, point in enumerate(found[0].points)
    ]
    effective = [
        [f"highest rate at {mark:.0%}", *(str(sweep.effective[number]) for sweep in found)]
        for number, mark in enumerate(MARKS)
    ]
    return [["RT attainment at", *(sweep.preset for sweep in found)], *shown, *effective]


def _attainment(point: SweepPoint) -> str:
    return Unit.SHARE.show(point.attainment.mean, point.attainment.half_range)


def sweep_tree(found: Sequence[Sweep]) -> dict[str, Any]:
    return {
        sweep.preset: {"points": figure_tree(sweep.points), "effective": figure_tree(sweep.effective)}
        for sweep in found
    }
