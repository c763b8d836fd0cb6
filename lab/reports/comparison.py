"""Compare presets over the same arrivals: the mean of each figure over the seeds, and half its range.

At several rates also find each preset's effective throughput: the highest rate at which it attains a mark. It lies
between the highest measured rate with enough attainment and the next rate, on the straight line between them. If even
the highest measured rate attains, it is a lower bound. If no measured rate attains, there is no answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alignedserve.lab.loads.figures.tables import Unit
from alignedserve.lab.loads.records.distribution import NOTHING, mean
from alignedserve.lab.reports.figure_rows import COMPARED, Better, FigureRow
from alignedserve.lab.reports.figures import figure_tree
from alignedserve.lab.reports.trial import TrialRun, by_preset, by_rate


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure of a preset over all seeds. The mean is NaN if some run of the preset lacks the figure."""

    mean: float
    half_range: float  # (most - least) ÷ 2 over the seeds
    is_best: bool = False

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Cell:
        found = mean(values)
        return cls(found, (max(values) - min(values)) / 2 if found == found else found)


@dataclass(frozen=True, slots=True)
class ComparedPresets:
    presets: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: Mapping[FigureRow, Mapping[str, Cell]]  # with a cell for each preset


def compare(runs: Sequence[TrialRun]) -> ComparedPresets:
    """Compare runs that differ only in preset and seed."""
    columns = by_preset(runs)
    seeds, rows = tuple(sorted({run.trial.seed for run in runs})), dict[FigureRow, Mapping[str, Cell]]()
    for row in COMPARED:
        values = {preset: [run.figures.at(row.path) for run in column] for preset, column in columns.items()}
        rows[row] = _marked({preset: Cell.from_values(found) for preset, found in values.items()}, row.better)
    return ComparedPresets(tuple(columns), seeds, rows)


def _marked(cells: Mapping[str, Cell], better: Better) -> Mapping[str, Cell]:
    """Mark the best cells. Mark none if all means are equal."""
    means = [cell.mean for cell in cells.values() if cell.mean == cell.mean]
    if len(set(means)) < 2:
        return cells
    best = max(means) if better is Better.HIGHER else min(means)
    return {preset: replace(cell, is_best=cell.mean == best) for preset, cell in cells.items()}


def comparison_table(comparison: ComparedPresets) -> list[list[str]]:
    """Return the rows of the table as text, titles first, without figures that no preset has."""
    shown = [
        [row.label, *(_shown(row, cell) for cell in cells.values())]
        for row, cells in comparison.rows.items()
        if any(cell.mean == cell.mean for cell in cells.values())
    ]
    return [["", *(f"{preset}  " for preset in comparison.presets)], *shown]


def _shown(row: FigureRow, cell: Cell) -> str:
    return f"{row.unit.show(cell.mean, cell.half_range)}{' *' if cell.is_best else '  '}"


def comparison_tree(comparison: ComparedPresets) -> dict[str, Any]:
    return {
        "presets": list(comparison.presets),
        "seeds": list(comparison.seeds),
        "figures": {
            row.path: {preset: figure_tree(cell) for preset, cell in cells.items()}
            for row, cells in comparison.rows.items()
        },
    }


# --- Several rates

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
    attained = [(point.rate, point.attainment.mean) for point in points]
    return Sweep(preset, points, tuple(effective_throughput(attained, mark) for mark in MARKS))


def _point(rate: float, runs: Sequence[TrialRun]) -> SweepPoint:
    return SweepPoint(
        rate,
        Cell.from_values([run.figures.rt.attainment for run in runs]),
        Cell.from_values([run.figures.papers.alise.normalised_latency_s for run in runs]),
    )


def effective_throughput(attained: Sequence[tuple[float, float]], mark: float) -> EffectiveThroughput:
    """Return the highest rate at the mark, from pairs of a rate and what is attained there, the lowest rate first."""
    attaining = [number for number, (_, share) in enumerate(attained) if share >= mark]
    if not attaining:
        return EffectiveThroughput(mark, NOTHING)
    rate, share = attained[attaining[-1]]
    if attaining[-1] == len(attained) - 1:
        return EffectiveThroughput(mark, rate, is_lower_bound=True)
    next_rate, next_share = attained[attaining[-1] + 1]
    fall = share - next_share
    crossing = rate if fall != fall else rate + (next_rate - rate) * (share - mark) / fall
    return EffectiveThroughput(mark, crossing)


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
