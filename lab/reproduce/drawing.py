"""Draws a figure in its paper's axes: curves over numbers, bars over names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from alignedserve.lab.reproduce.cells import Cells
from alignedserve.lab.reproduce.figure import Figure
from alignedserve.loads.figures.plotting import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osv^D*Px"
_BARS = 0.8  # width of all bars at one x
_OURS, _OTHERS = "#0b6e99", ("#c4541a", "#5b8c2a", "#7a4fa3", "#b08900", "#a3386b", "#3a8f8f", "#777777", "#9c6b4f")
_MOST_CLAIMS = 3  # of the paper, that are written below


def draw(figure: Figure, cells: Cells, path: Path) -> None:
    canvas = new_figure(6, 3.6)
    axis = canvas.subplots()
    if any(isinstance(x, str) for x in cells.xs):
        _bars(figure, cells, axis)
    else:
        _curves(figure, cells, axis)
    axis.set(xlabel=str(figure.x), ylabel=fill(str(figure.y), 32))
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.set_ylim(bottom=0)
    axis.set_title(fill(f"{figure.number}: {figure.title}", 66), loc="left", fontsize="medium", pad=8)
    canvas.legend(fontsize="small", loc="outside lower center", ncols=min(4, len(cells.labels)), frameon=False)
    for number, claim in enumerate(figure.claims[:_MOST_CLAIMS]):
        words = f"{claim.text}: {claim.paper:.3g} in the paper, {claim.of(cells):.3g} here"
        axis.annotate(words, (0, 0), (0, -34 - 11 * number), "axes fraction", "offset points", fontsize=7.5, va="top")
    save_figure(canvas, path)


def _curves(figure: Figure, cells: Cells, axis: Axes) -> None:
    for number, (label, colour) in enumerate(_coloured(figure, cells)):
        means, errors = _means(figure, cells, label)
        width, marker = 2.5 if label in figure.ours else 1.2, _MARKERS[number % len(_MARKERS)]
        axis.errorbar(cells.xs, means, errors, marker=marker, capsize=2, linewidth=width, label=label, color=colour)


def _bars(figure: Figure, cells: Cells, axis: Axes) -> None:
    width = _BARS / len(cells.labels)
    for number, (label, colour) in enumerate(_coloured(figure, cells)):
        means, errors = _means(figure, cells, label)
        places = [at + (number + 0.5) * width - _BARS / 2 for at in range(len(cells.xs))]
        axis.bar(places, means, width, yerr=errors, capsize=2, label=label, color=colour)
    axis.set_xticks(range(len(cells.xs)), map(str, cells.xs))


def _coloured(figure: Figure, cells: Cells) -> Iterator[tuple[str, str]]:
    """Yield each label with its colour: our default has the same in every picture."""
    others = iter(_OTHERS)
    for label in cells.labels:
        yield label, _OURS if label in figure.ours[:1] else next(others)


def _means(figure: Figure, cells: Cells, label: str) -> tuple[list[float], list[float]]:
    found = [cells.cell(label, x) for x in cells.xs]
    factor = figure.y.factor
    return [cell.mean * factor for cell in found], [cell.half_range * factor for cell in found]
