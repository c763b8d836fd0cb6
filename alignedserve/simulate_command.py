"""`alignedserve simulate`: runs a workload through a deployment in virtual time, and says what came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from alignedserve.errors import SimulateError
from alignedserve.progress import Progress
from alignedserve.simulate_once import run_once, settings_of
from alignedserve.simulator import plots, record_file
from alignedserve.simulator.records import RunRecord
from alignedserve.simulator.report import comparison_text, document, requests_csv, runs_csv, steps_csv, summary
from alignedserve.simulator.timeline import timeline
from alignedserve.simulator.trial import OnProgress, Run, Trial, trials

_WRONG = 1  # the simulation found something wrong with itself


@dataclass(frozen=True)
class Options:
    common: Trial  # what all runs share; its preset, seed and rate do not count
    presets: tuple[str, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...] = ()
    out: Path | None = None
    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None
    timeline: Path | None = None
    timeline_s: float = inf
    save: Path | None = None


def run(options: Options) -> int:
    planned = trials(options.common, options.presets, options.seeds, options.rates)
    _check(options, planned)
    runs = []
    for number, trial in enumerate(planned):
        with Progress(f"{number + 1}/{len(planned)} {trial.name}", sys.stderr) as progress:
            runs.append(_one(options, trial, alone=len(planned) == 1, on_progress=progress.show))
    text = summary(runs[0]) if len(runs) == 1 else comparison_text(runs)
    _write_all(options, runs, text)  # before the text: whoever reads it may leave early
    print(text, end="")
    return _complain(runs)


def _one(options: Options, trial: Trial, alone: bool, on_progress: OnProgress) -> Run:
    """Its record is written and let go: of many runs only the figures are kept."""
    record = run_once(trial, on_progress)
    if alone:
        _write_single(options, trial, record)
    if options.out is not None:
        _write_folder(options.out if alone else options.out / _folder_name(trial), trial, record, options.timeline_s)
    return Run.of(trial, record)


def _complain(runs: Sequence[Run]) -> int:
    wrong = [(one.trial.name, problem) for one in runs for problem in one.problems]
    for name, problem in wrong[:3]:
        print(f"alignedserve: {name}: {problem}", file=sys.stderr)
    if wrong[3:]:
        print(f"alignedserve: and {len(wrong) - 3} more problems", file=sys.stderr)
    return _WRONG if wrong else 0


# --- Before the first run


def _check(options: Options, planned: Sequence[Trial]) -> None:
    """What cannot be is said before anything runs."""
    for trial in planned:
        settings_of(trial)
    if len(planned) > 1 and (options.timeline or options.save):
        flag = "--timeline" if options.timeline else "--save"
        raise SimulateError(f"{flag} takes a single run, these are {len(planned)}: --out writes files for each")
    files = [path for path in (options.json, options.csv, options.plot, options.timeline, options.save) if path]
    for path in files:
        _check_writable(path)
    if len(set(files)) < len(files):
        raise SimulateError("two of the files to write have one name")
    if options.plot is not None:
        plots.check(options.plot)
    if options.out is not None:
        _make_folder(options.out)


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir():
        raise SimulateError(f"{path} cannot be written: {path.parent} is not a folder")
    if path.is_dir():
        raise SimulateError(f"{path} is a folder: name a file")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimulateError(f"--out {path} cannot be made: {error.strerror}") from None


# --- What is written


def _write_single(options: Options, trial: Trial, record: RunRecord) -> None:
    _write(options.csv, lambda: requests_csv(record))
    _write(options.csv and options.csv.with_name(f"{options.csv.stem}-steps.csv"), lambda: steps_csv(record))
    _write(options.timeline, lambda: timeline(record, options.timeline_s))
    if options.save is not None:
        record_file.save(record, options.save)
    if options.plot is not None:
        plots.plot_run(record, trial.name, options.plot)


def _write_folder(folder: Path, trial: Trial, record: RunRecord, timeline_s: float) -> None:
    _make_folder(folder)
    _write(folder / "requests.csv", lambda: requests_csv(record))
    _write(folder / "steps.csv", lambda: steps_csv(record))
    _write(folder / "timeline.json", lambda: timeline(record, timeline_s))
    if plots.are_possible():
        plots.plot_run(record, trial.name, folder / "run.svg")


def _write_all(options: Options, runs: Sequence[Run], text: str) -> None:
    _write(options.json, lambda: document(runs))
    if len(runs) > 1:
        _write(options.csv, lambda: runs_csv(runs))
        if options.plot is not None:
            _plot_several(runs, options.plot)
    if options.out is not None:
        _write(options.out / "summary.txt", lambda: text)
        _write(options.out / "figures.json", lambda: document(runs))
        _write(options.out / "runs.csv", lambda: runs_csv(runs))
        if len(runs) > 1 and plots.are_possible():
            _plot_several(runs, options.out / "runs.svg")


def _plot_several(runs: Sequence[Run], path: Path) -> None:
    is_sweep = len({one.trial.rate for one in runs}) > 1
    (plots.plot_sweep if is_sweep else plots.plot_comparison)(runs, path)


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise SimulateError(f"{path} cannot be written: {error.strerror}") from None


def _folder_name(trial: Trial) -> str:
    at = "" if trial.rate is None else f"-rate{trial.rate:g}"
    return f"{trial.preset}{at}-seed{trial.seed}"
