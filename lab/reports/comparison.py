"""Compare presets over the same arrivals: the mean of each figure over the seeds, and half its range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.lab.reports.figure_rows import COMPARED, Better, FigureRow
from alignedserve.lab.reports.figures import figure_tree
from alignedserve.lab.reports.trial import TrialRun, by_preset
from alignedserve.loads.records.distribution import mean


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
class ComparisonLine:
    row: FigureRow
    cells: tuple[Cell, ...]  # one cell for each preset


@dataclass(frozen=True, slots=True)
class ComparedPresets:
    presets: tuple[str, ...]
    seeds: tuple[int, ...]
    lines: tuple[ComparisonLine, ...]


def compare(runs: Sequence[TrialRun]) -> ComparedPresets:
    """Compare runs that differ only in preset and seed."""
    columns = by_preset(runs)
    seeds = tuple(sorted({run.trial.seed for run in runs}))
    return ComparedPresets(tuple(columns), seeds, tuple(_line(row, list(columns.values())) for row in COMPARED))


def _line(row: FigureRow, columns: Sequence[Sequence[TrialRun]]) -> ComparisonLine:
    return ComparisonLine(
        row, _marked([Cell.from_values([run.figures.at(row.path) for run in column]) for column in columns], row.better)
    )


def _marked(cells: Sequence[Cell], better: Better) -> tuple[Cell, ...]:
    """Mark the best cells. Mark none if all means are equal."""
    means = [cell.mean for cell in cells if cell.mean == cell.mean]
    if len(set(means)) < 2:
        return tuple(cells)
    best = max(means) if better is Better.HIGHER else min(means)
    return tuple(Cell(cell.mean, cell.half_range, cell.mean == best) for cell in cells)


def comparison_table(comparison: ComparedPresets) -> list[list[str]]:
    """Return the rows of the table as text, titles first, without figures that no preset has."""
    lines = [line for line in comparison.lines if any(cell.mean == cell.mean for cell in line.cells)]
    shown = [[line.row.label, *(_shown(line.row, cell) for cell in line.cells)] for line in lines]
    return [["", *(f"{preset}  " for preset in comparison.presets)], *shown]


def _shown(row: FigureRow, cell: Cell) -> str:
    return f"{row.unit.show(cell.mean, cell.half_range)}{' *' if cell.is_best else '  '}"


def comparison_tree(comparison: ComparedPresets) -> dict[str, Any]:
    return {
        "presets": list(comparison.presets),
        "seeds": list(comparison.seeds),
        "figures": {
            line.row.path: {
                preset: figure_tree(cell) for preset, cell in zip(comparison.presets, line.cells, strict=True)
            }
            for line in comparison.lines
        },
    }
