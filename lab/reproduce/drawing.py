"""Draws a figure in its paper's axes: curves over numbers, bars over names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alignedserve.lab.reports.plots import label_axis
from alignedserve.lab.reproduce.cells import Cells
from alignedserve.lab.reproduce.figure import Figure
from alignedserve.loads.figures.plotting import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osv^D*Px"
_BARS = 0.8  # width of all bars at one x


def draw(figure: Figure, cells: Cells, path: Path) -> None:
    canvas = new_figure(6, 3.6)
    axis = canvas.subplots()
    if any(isinstance(x, str) for x in cells.xs):
        _bars(figure, cells, axis)
    else:
        _curves(figure, cells, axis)
    label_axis(axis, "", str(figure.x), str(figure.y))
    axis.set_ylim(bottom=0)
    axis.legend(fontsize="small")
    save_figure(canvas, path)


def _curves(figure: Figure, cells: Cells, axis: Axes) -> None:
    for number, label in enumerate(cells.labels):
        means, errors = _means(figure, cells, label)
        width, marker = 2.5 if label in figure.ours else 1.2, _MARKERS[number % len(_MARKERS)]
        axis.errorbar(cells.xs, means, errors, marker=marker, capsize=2, linewidth=width, label=label)


def _bars(figure: Figure, cells: Cells, axis: Axes) -> None:
    width = _BARS / len(cells.labels)
    for number, label in enumerate(cells.labels):
        means, errors = _means(figure, cells, label)
        places = [at + (number + 0.5) * width - _BARS / 2 for at in range(len(cells.xs))]
        axis.bar(places, means, width, yerr=errors, capsize=2, label=label)
    axis.set_xticks(range(len(cells.xs)), map(str, cells.xs))


def _means(figure: Figure, cells: Cells, label: str) -> tuple[list[float], list[float]]:
    found = [cells.cell(label, x) for x in cells.xs]
    factor = figure.y.factor
    return [cell.mean * factor for cell in found], [cell.half_range * factor for cell in found]
