"""Write what was reproduced: a page of tables and pictures, and the numbers as JSON.

The page follows from the declared figures and from the numbers. Figures that have not run are left out, and so are
figures whose declaration has other systems or points than those that ran.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from alignedserve.cli.plotting import new_figure, save_figure
from alignedserve.errors import SimulateError
from alignedserve.lab.reproduce.figure import OURS, Cells, Claim, Figure, Paper, X

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PAGE, FOLDER = "reproductions.md", "reproductions"
_FORMAT = 1
_COMMAND = "alignedserve reproduce"


@dataclass(frozen=True, slots=True)
class FigureRun:
    """The values that the runs of a figure gave: those of all seeds, by system and x."""

    seeds: tuple[int, ...]
    is_full: bool
    values: Mapping[tuple[str, X], Sequence[float]]
    size: str = ""  # of each run: requests or seconds, and seats


Key = tuple[str, str]  # name of the paper, number of the figure
Runs = Mapping[Key, FigureRun]


def cells_of(figure: Figure, run: FigureRun) -> Cells | None:
    """Return the numbers of a figure in the order in which it declares them; None if others ran."""
    wanted = [(system.label, point.x) for point in figure.shown(run.is_full) for system in figure.systems]
    if set(wanted) != set(run.values):
        return None
    return Cells({key: run.values[key] for key in wanted}, figure.better)


def ran(papers: Iterable[Paper], runs: Runs) -> Iterator[tuple[Paper, list[tuple[Figure, FigureRun, Cells]]]]:
    """Yield the papers with a figure that ran, and what ran, in the declared order."""
    for paper in papers:
        found = [
            (figure, run, cells)
            for figure in paper.figures
            if (run := runs.get((paper.name, figure.number))) and (cells := cells_of(figure, run))
        ]
        if found:
            yield paper, found


# --- The page


def page(papers: Iterable[Paper], runs: Runs) -> str:
    head = (
        "# Reproductions\n\n"
        f"The papers' figures, simulated. `{_COMMAND} --out FOLDER` writes this page, its numbers and the\n"
        "pictures. The declarations are in `lab/reproduce/`. A value is the mean over the seeds.\n"
        "*Shown* is the part of the paper's effect that is seen here: 1 for all of it, 0.5 for half (a quotient of 2\n"
        "in place of 4, or a difference of 2 in place of 4), below 0 for the opposite. In pictures a hollow diamond\n"
        "in a system's colour stands where the paper's number would put it, all else being as here (a triangle at\n"
        "the edge: above it). docs/how/simulate.md defines what is measured; `alignedserve presets` says how each\n"
        "system differs from its paper."
    )
    found = [(claim, cells) for _, each in ran(papers, runs) for figure, _, cells in each for claim in figure.claims]
    return "\n\n".join([head, f"All papers: {shown(found)}", *_papers(papers, runs, with_pictures=True)]) + "\n"


def tables(papers: Iterable[Paper], runs: Runs) -> str:
    return "\n\n".join(_papers(papers, runs, with_pictures=False)) + "\n"


def _papers(papers: Iterable[Paper], runs: Runs, with_pictures: bool) -> Iterator[str]:
    for paper, found in ran(papers, runs):
        yield f"## {paper.title}"
        for figure, run, cells in found:
            yield from _figure(paper, figure, run, cells, with_pictures)


def _figure(paper: Paper, figure: Figure, run: FigureRun, cells: Cells, with_picture: bool) -> Iterator[str]:
    yield f"### {paper.title}, figure {figure.number}: {figure.title}"
    if with_picture and (paper.pictured is None or figure.number in paper.pictured):
        yield f"![{paper.title}, figure {figure.number}]({FOLDER}/{picture(paper, figure)})"
    yield f"{_command(paper, figure, run)}\n\n{_cells_table(figure, cells)}"
    if figure.claims:
        yield _table(["what", "paper", "ours", "shown"], [_claim(claim, cells) for claim in figure.claims])
    said = shown((claim, cells) for claim in figure.claims)
    yield " ".join(filter(None, (said, figure.finding, _ours(figure, cells))))


def picture(paper: Paper, figure: Figure) -> str:
    return f"{paper.name}-{figure.number}.svg"


def _command(paper: Paper, figure: Figure, run: FigureRun) -> str:
    full = " --full" if run.is_full else ""
    command = f"`{_COMMAND} {paper.name} --figure {figure.number} --seeds {','.join(map(str, run.seeds))}{full}`"
    return f"{command}: {len(run.seeds)} seed{'s' * (len(run.seeds) > 1)}{f', {run.size}' if run.size else ''}"


def _cells_table(figure: Figure, cells: Cells) -> str:
    rows = [[_x(x), *(_number(cells.at(label, x) * figure.y.factor) for label in cells.labels)] for x in cells.xs]
    return _table([f"{figure.x} \\ {figure.y}", *cells.labels], rows)


def _claim(claim: Claim, cells: Cells) -> list[str]:
    part = _number(claim.shown(cells)) if claim.is_effect else ""
    return [claim.text, _number(claim.paper), _number(claim.of(cells)), part]


# From which part of the paper's effect on it counts as what.
_PARTS = {1.0: "in full", 0.5: "half or more", 0.1: "less than half", -0.1: "none", -inf: "the opposite"}


def shown(claims: Iterable[tuple[Claim, Cells]]) -> str:
    """Return a sentence on how much of the paper's effects is shown."""
    parts = [claim.shown(cells) for claim, cells in claims if claim.is_effect]
    counts = Counter(next((word for least, word in _PARTS.items() if part >= least), "not known") for part in parts)
    told = [f"{counts[word]} {word}" for word in (*_PARTS.values(), "not known") if counts[word]]
    return f"Of {len(parts)} effect{'s' * (len(parts) > 1)}: {', '.join(told)}." if parts else ""


def _ours(figure: Figure, cells: Cells) -> str:
    """Say where our default, on each of its clusters, is at least equal to the best of the others.

    The reason that the figure has is that of the cluster which is behind least."""
    behind = {label: cells.behind(label, figure.ours) for label in figure.ours}
    least = min(behind, key=lambda label: sum(behind[label].values()), default="")
    told = []
    for system in figure.systems:
        if (found := behind.get(system.label)) is None:
            continue
        ours = "`aligned`" if len(behind) == 1 else f"`aligned` as `{system.cluster}`"
        if not found:
            told.append(f"{ours} is at least equal to the best of the others everywhere.")
            continue
        where = ", ".join(f"{100 * share:.0f} % at {_x(x)}" for x, share in found.items())
        why = f": {figure.behind}" if figure.behind and system.label == least else "."
        told.append(f"{ours} is behind the best by {where}{why}")
    return " ".join(told)


def _x(x: X) -> str:
    return x if isinstance(x, str) else f"{x:g}"


def _number(value: float) -> str:
    if not isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- The numbers


def numbers(paper: Paper) -> str:
    """Return the name of the file with the numbers of a paper."""
    return f"{paper.name}.json"


def document(paper: Paper, runs: Runs) -> str:
    """Return the numbers as JSON, with a line for each figure."""
    found = [_figure_tree(*parts) for _, every in ran([paper], runs) for parts in every]
    head = json.dumps({"format": _FORMAT, "paper": paper.name})
    lines = ",\n".join(json.dumps(figure, allow_nan=False) for figure in found)
    return f'{head[:-1]}, "figures": [\n{lines}\n]}}\n'


def _figure_tree(figure: Figure, run: FigureRun, cells: Cells) -> dict[str, Any]:
    return {
        "number": figure.number,
        "metric": figure.metric,
        "seeds": list(run.seeds),
        "full": run.is_full,
        "size": run.size,
        "cells": [
            {"system": label, "x": x, "values": [value if isfinite(value) else None for value in values]}
            for (label, x), values in cells.values.items()
        ],
        "claims": [{"what": claim.text, "paper": claim.paper, "ours": _known(claim, cells)} for claim in figure.claims],
    }


def _known(claim: Claim, cells: Cells) -> float | None:
    ours = claim.of(cells)
    return ours if isfinite(ours) else None


def read_document(text: str, name: str) -> Runs:
    """Return what ran before, as the JSON of this name says."""
    try:
        tree = json.loads(text)
        if tree["format"] != _FORMAT:
            raise SimulateError(f"{name} is of another version: write it to another folder")
        return {(tree["paper"], figure["number"]): _figure_run(figure) for figure in tree["figures"]}
    except (ValueError, KeyError, TypeError) as error:
        raise SimulateError(f"{name} was not written by {_COMMAND} ({type(error).__name__}: {error})") from None


def _figure_run(tree: Mapping[str, Any]) -> FigureRun:
    values = {
        (cell["system"], cell["x"]): [float("nan") if value is None else value for value in cell["values"]]
        for cell in tree["cells"]
    }
    return FigureRun(tuple(tree["seeds"]), tree["full"], values, tree.get("size", ""))


# --- Pictures


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
            beside.setdefault((y, label), []).append(_drawn_number(place))
        elif y > edge:
            above.setdefault((place, label), []).append(_drawn_number(y))
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


def _drawn_number(value: float) -> str:
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
