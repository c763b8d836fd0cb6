"""`alignedserve reproduce`: runs the figures of papers, and writes them beside what the papers say."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean as mean
from typing import TypeAlias

import alignedserve
from alignedserve.cli.plotting import new_figure
from alignedserve.errors import SimulateError, file_errors
from alignedserve.interrupt import INTERRUPTED
from alignedserve.lab.cli.flags import WhatIsReproduced
from alignedserve.lab.processes import one_for_each_core, processes
from alignedserve.lab.reports import plots
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial, TrialRun
from alignedserve.lab.reproduce.figure import Figure, Paper, X
from alignedserve.lab.reproduce.page import (
    FOLDER,
    PAGE,
    FigureRun,
    Key,
    Runs,
    document,
    draw,
    numbers,
    page,
    picture,
    ran,
    read_document,
    tables,
)
from alignedserve.lab.reproduce.papers import PAPERS
from alignedserve.lab.trials.building import settings_of, workload_of
from alignedserve.lab.trials.running import figures_of
from alignedserve.progress import ProgressBar, about

_WALL = "speed.wall_s"  # the metric that says how long a trial took
_USUAL_S, _FULL_S = 7.0, 35.0  # of a trial on one core, the mean of some of all papers: until those of now have ended


def run(papers: Sequence[Paper], asked: WhatIsReproduced) -> int:
    before = {} if asked.out is None else _prepared(asked.out)
    path = None if asked.out is None else asked.out / FOLDER / NAME
    kept, is_whole = KeptRuns(_metrics([*PAPERS.values(), *papers]), path), True
    trials = _trials_of(papers, asked)
    try:
        _run_all(trials, asked, kept)
    except KeyboardInterrupt:
        is_whole = False
    runs = {
        (paper.name, figure.number): _figure_run(figure, asked, kept)
        for paper in papers
        for figure in paper.figures
        if is_whole or all(trial in kept for _, _, trial in figure.trials(asked.seeds, asked.full))
    }
    if not is_whole:
        _say(f"alignedserve: {_interrupted(sum(trial in kept for trial in trials), len(trials), len(runs), path)}")
    if asked.out is not None and runs:
        write(asked.out, papers, {**before, **runs})
    if runs:
        print(tables(papers, runs), end="")
    return 0 if is_whole else INTERRUPTED


def _metrics(papers: Iterable[Paper]) -> list[str]:
    return [_WALL, *sorted({figure.metric for paper in papers for figure in paper.figures})]


def _trials_of(papers: Sequence[Paper], asked: WhatIsReproduced) -> list[SimulationTrial]:
    """Return each trial once, whatever the number of figures that want it."""
    figures = [figure for paper in papers for figure in paper.figures]
    return list(dict.fromkeys(trial for figure in figures for *_, trial in figure.trials(asked.seeds, asked.full)))


def _run_all(trials: Sequence[SimulationTrial], asked: WhatIsReproduced, kept: KeptRuns) -> None:
    """Run the trials that are not kept, and keep each as it ends."""
    left = {trial: None for trial in trials if trial not in kept}  # in order
    jobs = asked.jobs or one_for_each_core()
    time_left = TimeLeft(_FULL_S if asked.full else _USUAL_S, jobs)
    for trial in trials:
        if trial in kept:
            time_left.ended(trial, kept[trial][_WALL])
    known = f", {len(trials) - len(left)} of them kept from an earlier command" if len(left) < len(trials) else ""
    takes = f"{about(time_left.of(left))} with {jobs} process{'es' * (jobs > 1)}; estimated again as they end"
    _say(f"reproduce: {len(trials)} simulated runs{known}: {takes if left else 'nothing is left to run'}")
    with ProgressBar("runs", sys.stderr) as progress:
        for done in _each([*left], jobs):
            kept.add(done.trial, done.figures)
            del left[done.trial]
            time_left.ended(done.trial, done.figures.at(_WALL))
            progress.show(len(trials) - len(left), len(trials), time_left.of(left) if left else None)


def _each(trials: Sequence[SimulationTrial], jobs: int) -> Iterator[TrialRun]:
    with processes(jobs) as started:
        for done in started.as_done(figures_of, trials):
            if done.problems:
                raise SimulateError(f"{done.trial.title}: {done.problems[0]}")
            yield done


class TimeLeft:
    """A trial takes as long as those that differ from it by the seed; until one of these has ended, as long as the mean
    of all that have, and before that the usual time."""

    def __init__(self, usual_s: float, processes: int) -> None:
        self._usual_s, self._processes = usual_s, processes
        self._took_s: defaultdict[SimulationTrial, list[float]] = defaultdict(list)

    def ended(self, trial: SimulationTrial, took_s: float) -> None:
        self._took_s[replace(trial, seed=0)].append(took_s)

    def of(self, trials: Iterable[SimulationTrial]) -> float:
        """Return how many seconds these trials will take in all the processes together."""
        all_took_s = [took_s for those in self._took_s.values() for took_s in those]
        usual_s = [mean(all_took_s) if all_took_s else self._usual_s]
        left_s = [mean(self._took_s.get(replace(trial, seed=0), usual_s)) for trial in trials]
        return max(sum(left_s) / self._processes, max(left_s, default=0.0))


def _interrupted(num_run: int, num_wanted: int, num_figures: int, path: Path | None) -> str:
    ended = f"interrupted after {num_run} of {num_wanted} runs"
    if path is None:
        return f"{ended}, which are lost: --out FOLDER keeps them for the next time"
    whole = f"figures that are whole: {num_figures}"
    return f"{ended}, which {path} keeps: the same command goes on from there; {whole}"


def _figure_run(figure: Figure, asked: WhatIsReproduced, kept: KeptRuns) -> FigureRun:
    values: dict[tuple[str, X], list[float]] = {}
    for label, x, trial in figure.trials(asked.seeds, asked.full):
        values.setdefault((label, x), []).append(kept[trial][figure.metric])
    return FigureRun(asked.seeds, asked.full, values, size_of(figure, asked.full))


def size_of(figure: Figure, is_full: bool) -> str:
    """Return what each run has: seconds of arrivals or requests, and the seats of a worker of our default."""
    trials = [trial for label, _, trial in figure.trials([0], is_full) if label in figure.ours]
    seats = sorted({settings_of(trial).limits.max_batch for trial in trials})
    spans = {tuple(stream.span for stream in workload_of(trial).streams) for trial in trials}
    seconds = sorted({span.first_s for each in spans for span in each if span.first_s is not None})
    numbers = sorted({sum(span.num_requests or 0 for span in each) for each in spans if each[0].first_s is None})
    sizes = [f"{_listed(seconds)} s of arrivals"] if seconds else []
    sizes += [f"{_listed(numbers)} requests"] if any(numbers) else []
    return f"{', '.join(sizes)}{', ' * bool(sizes)}{_listed(seats)} seats"


def _listed(values: Iterable[float]) -> str:
    return " or ".join(f"{value:,g}" for value in values if value)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- What is written


def _prepared(out: Path) -> Runs:
    """Make the folder, and return what ran before: a page holds what all commands wrote to it."""
    if not plots.are_possible():
        new_figure(1, 1)
    with file_errors(SimulateError, f"--out {out}", "made"):
        (out / FOLDER).mkdir(parents=True, exist_ok=True)
        return runs_in(out)


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
    with file_errors(SimulateError, f"--out {out}"):
        for paper, _ in ran([PAPERS[paper.name] for paper in papers], runs):
            (out / FOLDER / numbers(paper)).write_text(document(paper, runs), encoding="utf-8")
        (out / PAGE).write_text(page(PAPERS.values(), runs), encoding="utf-8")
    _draw(out / FOLDER, papers, runs)


def _draw(folder: Path, papers: Iterable[Paper], runs: Runs) -> None:
    for paper, found in ran(papers, runs):
        for figure, _, cells in found:
            draw(figure, cells, folder / picture(paper, figure))


NAME = "runs.jsonl"
_INPUTS = (".py", ".json", ".yaml", ".csv", ".lua")  # files of the package that a simulation may read

Values: TypeAlias = Mapping[str, float]  # metric, as a path of `RunFigures` -> value


class KeptRuns:
    """The values of the trials that have ended. Without a file they are kept only as long as the command runs.

    The file has a line for each trial as it ends: an interrupted command goes on from there. The first line is a
    digest of the code. What other code gave is not read, and makes room for what this code gives.
    """

    def __init__(self, metrics: Sequence[str], path: Path | None = None) -> None:
        self._metrics, self._path = metrics, path
        self._values: dict[str, Values] = {}
        self._head = "" if path is None else json.dumps({"code": _digest_of_code()})
        if path is None:
            return
        if path.exists():
            self._values.update(self._read(path.read_text(encoding="utf-8")))
        new = path.with_suffix(".new")  # without what is cut off
        self._write("w", self._head, *map(_line, self._values, self._values.values()), path=new)
        os.replace(new, path)

    def __contains__(self, trial: SimulationTrial) -> bool:
        return repr(trial) in self._values

    def __getitem__(self, trial: SimulationTrial) -> Values:
        return self._values[repr(trial)]

    def add(self, trial: SimulationTrial, figures: RunFigures) -> None:
        key = repr(trial)
        self._values[key] = {metric: figures.at(metric) for metric in self._metrics}
        if self._path is not None:
            self._write("a", _line(key, self._values[key]), path=self._path)

    @staticmethod
    def _write(mode: str, *lines: str, path: Path) -> None:
        with file_errors(SimulateError, path), path.open(mode, encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

    def _read(self, text: str) -> Iterator[tuple[str, Values]]:
        """Yield the trials with all these metrics; a command that was killed may have left half a line."""
        head, *lines = text.splitlines() or [""]
        for line in lines if head == self._head else ():
            with suppress(ValueError, KeyError, TypeError):
                tree = json.loads(line)
                yield tree["trial"], {metric: float(tree["values"][metric]) for metric in self._metrics}


def _line(trial: str, values: Values) -> str:
    return json.dumps({"trial": trial, "values": values})


def _digest_of_code() -> str:
    """Return a digest of all that decides what a simulation gives, but for what the trial itself says."""
    digest, package = hashlib.blake2b(digest_size=16), Path(alignedserve.__file__).parent
    folders = os.walk(package, followlinks=True)  # in a checkout some of its folders are links
    for path in sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(_INPUTS)):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
