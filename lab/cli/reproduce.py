"""`alignedserve reproduce`: runs the figures of papers, and writes them beside what the papers say."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from alignedserve.cli.terminal.progress import ProgressBar
from alignedserve.errors import SimulateError
from alignedserve.lab.cli.simulating import WhatIsReproduced
from alignedserve.lab.reports import plots
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial, TrialRun
from alignedserve.lab.reproduce import drawing
from alignedserve.lab.reproduce.cells import X
from alignedserve.lab.reproduce.figure import Figure, Paper
from alignedserve.lab.reproduce.page import (
    FOLDER,
    PAGE,
    FigureRun,
    Key,
    Runs,
    document,
    numbers,
    page,
    picture,
    ran,
    read_document,
    tables,
)
from alignedserve.lab.reproduce.papers import PAPERS
from alignedserve.lab.trials.side_by_side import figures_of, side_by_side
from alignedserve.loads.figures.plotting import new_figure

Found = Mapping[SimulationTrial, RunFigures]


def run(papers: Sequence[Paper], asked: WhatIsReproduced) -> int:
    before = {} if asked.out is None else _prepared(asked.out)
    found = _figures_of_all(papers, asked)
    runs = {
        (paper.name, figure.number): _figure_run(figure, asked, found) for paper in papers for figure in paper.figures
    }
    if asked.out is not None:
        write(asked.out, papers, {**before, **runs})
    print(tables(papers, runs), end="")
    return 0


def _figures_of_all(papers: Sequence[Paper], asked: WhatIsReproduced) -> Found:
    """Run each trial once, whatever the number of figures that want it."""
    trials = [
        trial for paper in papers for figure in paper.figures for _, _, trial in figure.trials(asked.seeds, asked.full)
    ]
    found: dict[SimulationTrial, RunFigures] = {}
    wanted = list(dict.fromkeys(trials))
    print(f"reproduce: {len(wanted)} simulated runs; the rest is shown as they end", file=sys.stderr, flush=True)
    with ProgressBar("runs", sys.stderr) as progress:
        try:
            for done in _each(wanted, asked.jobs):
                found[done.trial] = done.figures
                progress.show(len(found), len(wanted))
        except KeyboardInterrupt:
            progress.note(f"alignedserve: interrupted after {len(found)} of {len(wanted)} runs; nothing is written")
            raise
    return found


def _each(trials: Sequence[SimulationTrial], jobs: int | None) -> Iterator[TrialRun]:
    with side_by_side(figures_of, jobs) as run_all:
        for done in run_all(trials):
            if done.problems:
                raise SimulateError(f"{done.trial.title}: {done.problems[0]}")
            yield done


def _figure_run(figure: Figure, asked: WhatIsReproduced, found: Found) -> FigureRun:
    values: dict[tuple[str, X], list[float]] = {}
    for label, x, trial in figure.trials(asked.seeds, asked.full):
        values.setdefault((label, x), []).append(found[trial].at(figure.metric))
    return FigureRun(asked.seeds, asked.full, values)


# --- What is written


def _prepared(out: Path) -> Runs:
    """Make the folder, and return what ran before: a page holds what all commands wrote to it."""
    if not plots.are_possible():
        new_figure(1, 1)
    try:
        (out / FOLDER).mkdir(parents=True, exist_ok=True)
        return runs_in(out)
    except OSError as error:
        raise SimulateError(f"--out {out} cannot be made: {error.strerror}") from None


def runs_in(out: Path) -> Runs:
    """Return what ran of all papers, as the files in the folder have it."""
    files = [out / FOLDER / numbers(paper) for paper in PAPERS.values()]
    found: dict[Key, FigureRun] = {}
    for path in files:
        if path.exists():
            found.update(read_document(path.read_text(encoding="utf-8"), str(path)))
    return found


def write(out: Path, papers: Sequence[Paper], runs: Runs) -> None:
    """Write the page of all that ran, and the numbers and pictures of these papers."""
    try:
        for paper, _ in ran([PAPERS[paper.name] for paper in papers], runs):
            (out / FOLDER / numbers(paper)).write_text(document(paper, runs), encoding="utf-8")
        (out / PAGE).write_text(page(PAPERS.values(), runs), encoding="utf-8")
    except OSError as error:
        raise SimulateError(f"--out {out} cannot be written: {error.strerror}") from None
    _draw(out / FOLDER, papers, runs)


def _draw(folder: Path, papers: Iterable[Paper], runs: Runs) -> None:
    for paper, found in ran(papers, runs):
        for figure, _, cells in found:
            drawing.draw(figure, cells, folder / picture(paper, figure))
