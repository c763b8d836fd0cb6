"""Draws a figure in its paper's axes: curves over numbers, bars over names."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from alignedserve.lab.reproduce.cells import Cells, X
from alignedserve.lab.reproduce.figure import OURS, Figure
from alignedserve.loads.figures.plotting import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osv^D*Px"
_BARS = 0.8  # width of all bars at one x
_OURS, _OTHERS = "#0b84b8", ("#c4541a", "#5b8c2a", "#7a4fa3", "#b08900", "#a3386b", "#3a8f8f", "#777777", "#9c6b4f")
_MOST_CLAIMS = 3  # of the paper, that are written below
_MARK: dict[str, Any] = {"s": 36, "c": "white", "linewidths": 1.4, "zorder": 5, "clip_on": False}
_HIGHEST_MARK = 1.25  # of our highest value and x: marks beyond are at the edge, with their value


def draw(figure: Figure, cells: Cells, path: Path) -> None:
    canvas = new_figure(6, 3.6)
    axis = canvas.subplots()
    if any(isinstance(x, str) for x in cells.xs):
        _bars(figure, cells, axis)
    else:
        _curves(figure, cells, axis)
    axis.set_xlabel(str(figure.x))
    axis.set_ylabel(fill(str(figure.y), 36), fontsize="small")
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    _marks(figure, cells, axis)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.04)  # also where all values are one
    axis.set_title(fill(f"{figure.number}: {figure.title}", 66), loc="left", fontsize="medium", pad=8)
    canvas.legend(fontsize="small", loc="outside lower center", ncols=4, frameon=False)
    for number, claim in enumerate(figure.claims[:_MOST_CLAIMS]):
        ours = claim.of(cells)
        words = f"{claim.text}: {claim.paper:.3g} in the paper, {f'{ours:.3g}' if isfinite(ours) else 'none'} here"
        axis.annotate(words, (0, 0), (0, -34 - 11 * number), "axes fraction", "offset points", fontsize=7.5, va="top")
    save_figure(canvas, path)


def _curves(figure: Figure, cells: Cells, axis: Axes) -> None:
    for number, (label, colour) in enumerate(_coloured(figure, cells)):
        means, errors = _means(figure, cells, label)
        line: dict[str, Any] = {"label": label, "color": colour, "marker": _MARKERS[number % len(_MARKERS)]}
        if colour == _OURS:  # wide and below: a line that ours lies on stays visible
            style = "-" if label in figure.ours[:1] else ":"
            line |= {"linewidth": 4, "markersize": 9, "zorder": 1, "linestyle": style}
        axis.errorbar(cells.xs, means, errors, capsize=2, **line)
    axis.set_xticks(cells.xs, [f"{x:g}" for x in cells.xs])


def _bars(figure: Figure, cells: Cells, axis: Axes) -> None:
    width = _BARS / len(cells.labels)
    for label, colour in _coloured(figure, cells):
        means, errors = _means(figure, cells, label)
        places = [_place(cells, label, x) for x in cells.xs]
        hatch = "///" if colour == _OURS and label not in figure.ours[:1] else None
        bar: dict[str, Any] = {"label": label, "color": colour, "hatch": hatch, "edgecolor": "white"}
        axis.bar(places, means, width, yerr=errors, capsize=2, **bar)
    axis.set_xticks(range(len(cells.xs)), map(str, cells.xs))
    room = 1.2 if len(cells.xs) == 1 else 0.5  # so that a single group does not fill the picture
    axis.set_xlim(-room, len(cells.xs) - 1 + room)


def _marks(figure: Figure, cells: Cells, axis: Axes) -> None:
    """Mark where the paper's numbers put a system, beside what they are compared with here."""
    marks = [mark for claim in figure.claims for mark in claim.marks(cells) if isfinite(mark[2])]
    edge, colours = axis.get_ylim()[1] * _HIGHEST_MARK, dict(_coloured(figure, cells))
    right = axis.get_xlim()[1] * _HIGHEST_MARK
    above: dict[tuple[float, str], list[str]] = {}
    beside: dict[tuple[float, str], list[str]] = {}
    for label, x, value in marks:
        place, y = _place(cells, label, x), value * figure.y.factor
        if place > right:
            beside.setdefault((y, label), []).append(_number(place))
        elif y > edge:
            above.setdefault((place, label), []).append(_number(y))
        elif isfinite(place):
            axis.scatter([place], [y], marker="D", edgecolors=colours[label], **_MARK)
    small: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "ha": "center"}
    for (place, label), values in above.items():
        axis.scatter([place], [edge], marker="^", edgecolors=colours[label], **_MARK)
        axis.annotate("\n".join(values), (place, edge), (0, -7), va="top", **small)
    step = 0.06 * (right - axis.get_xlim()[0])  # between marks of several systems at one height
    for number, ((y, label), values) in enumerate(beside.items()):
        place = right - step * sum(other == y for other, _ in [*beside][:number])
        axis.scatter([place], [y], marker=">", edgecolors=colours[label], **_MARK)
        axis.annotate("\n".join(values), (place, y), (0, 6), va="bottom", **small)
    if marks:
        axis.scatter([], [], marker="D", edgecolors="#111111", label="by the paper's number", **_MARK)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _place(cells: Cells, label: str, x: X) -> float:
    """Return where a system's value is on the x axis."""
    if not any(isinstance(other, str) for other in cells.xs):
        return float(x)
    return cells.xs.index(x) + (cells.labels.index(label) + 0.5) * _BARS / len(cells.labels) - _BARS / 2


def _coloured(figure: Figure, cells: Cells) -> Iterator[tuple[str, str]]:
    """Yield each label with its colour: our default, with whatever options, has the same in every picture."""
    ours, others = {system.label for system in figure.systems if system.preset == OURS}, iter(_OTHERS)
    for label in cells.labels:
        yield label, _OURS if label in ours else next(others)


def _means(figure: Figure, cells: Cells, label: str) -> tuple[list[float], list[float]]:
    found = [cells.cell(label, x) for x in cells.xs]
    factor = figure.y.factor
    return [cell.mean * factor for cell in found], [cell.half_range * factor for cell in found]
