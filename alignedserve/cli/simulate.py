"""`alignedserve simulate`: runs a workload through a deployment in virtual time, and reports the figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from alignedserve.cli.terminal.arguments import check_writable
from alignedserve.cli.terminal.progress import ProgressBar
from alignedserve.errors import SimulateError
from alignedserve.simulator.fuzzing.recording import Difference, difference_text, first_difference, read_trial
from alignedserve.simulator.records import record_file
from alignedserve.simulator.records.records import RunRecord
from alignedserve.simulator.reports import plots
from alignedserve.simulator.reports.report import (
    comparison_text,
    document,
    requests_csv,
    runs_csv,
    steps_csv,
    summary,
    write,
)
from alignedserve.simulator.reports.timeline import timeline
from alignedserve.simulator.reports.trial import OnProgress, SimulationTrial, TrialRun, trials
from alignedserve.simulator.trials.building import check_rates, settings_of
from alignedserve.simulator.trials.running import run_filmed, run_once, run_saved
from alignedserve.simulator.trials.side_by_side import side_by_side

_WRONG = 1  # the simulation found something wrong with itself
_DIFFERENT = 1  # two runs that were compared differ


@dataclass(frozen=True)
class SimulateOptions:
    common: SimulationTrial  # what all runs share; each run has a preset, seed and rate of its own
    presets: tuple[str, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...] = ()
    out: Path | None = None
    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None
    timeline: Path | None = None
    timeline_s: float = inf
    record: Path | None = None
    save: Path | None = None
    page: Path | None = None
    jobs: int | None = None  # processes; None: one for each core


def run(options: SimulateOptions) -> int:
    planned = trials(options.common, options.presets, options.seeds, options.rates)
    _check(options, planned)
    with _folder(options.out):
        _check_files(options, alone=len(planned) == 1)
        runs = _all(options, planned)
        text = summary(runs[0]) if len(runs) == 1 else comparison_text(runs)
        _write_all(options, runs, text)  # before the text: its reader may leave early
    print(text, end="")
    return _complain(runs)


def _all(options: SimulateOptions, planned: Sequence[SimulationTrial]) -> list[TrialRun]:
    if len(planned) == 1:
        with ProgressBar(planned[0].name, sys.stderr) as progress:
            return [_run_trial(options, planned[0], alone=True, on_progress=progress.show)]
    found: dict[SimulationTrial, TrialRun] = {}
    with (
        ProgressBar("runs", sys.stderr) as progress,
        side_by_side(partial(_run_of_many, options), options.jobs) as run_all,
    ):
        for run in run_all(planned):
            found[run.trial] = run
            progress.show(len(found), len(planned))
    return [found[trial] for trial in planned]


def _run_of_many(options: SimulateOptions, trial: SimulationTrial) -> TrialRun:
    return _run_trial(options, trial, alone=False, on_progress=lambda _ended, _all_requests: None)


def _run_trial(options: SimulateOptions, trial: SimulationTrial, alone: bool, on_progress: OnProgress) -> TrialRun:
    """Run the trial and write its record; only the figures are kept of it, since there may be many runs."""
    record = _record_of(options, trial, on_progress)
    if alone:
        _write_single(options, trial, record)
    if options.out is not None:
        _write_folder(options.out if alone else options.out / _folder_name(trial), trial, record, options.timeline_s)
    return TrialRun.from_record(trial, record)


def _record_of(options: SimulateOptions, trial: SimulationTrial, on_progress: OnProgress) -> RunRecord:
    if options.save is not None:
        return run_saved(trial, on_progress, options.save)
    if options.page is not None:
        return run_filmed(trial, on_progress, options.page)
    return run_once(trial, on_progress)


def _complain(runs: Sequence[TrialRun]) -> int:
    wrong = [(run.trial.name, problem) for run in runs for problem in run.problems]
    for name, problem in wrong[:3]:
        print(f"alignedserve: {name}: {problem}", file=sys.stderr)
    if wrong[3:]:
        print(f"alignedserve: and {len(wrong) - 3} more problems", file=sys.stderr)
    return _WRONG if wrong else 0


# --- Saved runs


def replay(saved: Path) -> int:
    """Return 0 where every command of every part is the same, byte for byte, and 1 otherwise, as `diff` does."""
    trial = read_trial(saved)
    with TemporaryDirectory() as folder, ProgressBar(trial.name, sys.stderr) as progress:
        again = Path(folder) / f"again{saved.suffix}"
        run_saved(trial, progress.show, again)
        found = first_difference(saved, again, read_trial)
    return _tell(found, "saved", "this time")


def diff(first: Path, second: Path) -> int:
    return _tell(first_difference(first, second, read_trial), str(first), str(second))


def _tell(found: Difference | int, first: str, second: str) -> int:
    print(difference_text(found, first, second))
    return 0 if isinstance(found, int) else _DIFFERENT


# --- Before the first run


def _check(options: SimulateOptions, planned: Sequence[SimulationTrial]) -> None:
    """Refuse options that cannot work, before anything runs."""
    check_rates(options.common, options.rates)
    for trial in planned:
        settings_of(trial)
    single = {
        "--timeline": options.timeline,
        "--record": options.record,
        "--save": options.save,
        "--page": options.page,
    }
    if len(planned) > 1 and any(single.values()):
        flag = next(flag for flag, path in single.items() if path)
        raise SimulateError(f"{flag} takes a single run, these are {len(planned)}: --out writes files for each")
    if options.save is not None and options.page is not None:
        raise SimulateError("--save and --page write a run each: leave one of them out")
    if options.plot is not None:
        plots.check(options.plot)


def _check_files(options: SimulateOptions, alone: bool) -> None:
    named = [options.json, options.csv, options.csv and alone and _steps_beside(options.csv)]
    files = [
        path for path in (*named, options.plot, options.timeline, options.record, options.save, options.page) if path
    ]
    for path in files:
        check_writable(path)
    if len({path.resolve() for path in files}) < len(files):
        raise SimulateError("two of the files to write have one name")


@contextmanager
def _folder(path: Path | None) -> Iterator[None]:
    """Make the folder where it is missing; what was made is removed again if nothing was written to it."""
    missing = [folder for folder in (path, *path.parents) if not os.path.exists(folder)] if path else []
    try:
        if path is not None:
            _make(path)
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimulateError(f"--out {path} cannot be made: {error.strerror}") from None


# --- What is written


def _write_single(options: SimulateOptions, trial: SimulationTrial, record: RunRecord) -> None:
    _write(options.csv, lambda: requests_csv(record))
    _write(options.csv and _steps_beside(options.csv), lambda: steps_csv(record))
    _write(options.timeline, lambda: timeline(record, options.timeline_s))
    if options.record is not None:
        record_file.save(record, options.record)
    if options.plot is not None:
        plots.plot_run(record, trial.title, options.plot)


def _write_folder(folder: Path, trial: SimulationTrial, record: RunRecord, timeline_s: float) -> None:
    with _folder(folder):
        _write(folder / "requests.csv", lambda: requests_csv(record))
        _write(folder / "steps.csv", lambda: steps_csv(record))
        _write(folder / "timeline.json", lambda: timeline(record, timeline_s))
        if plots.are_possible():
            plots.plot_run(record, trial.title, folder / "run.svg")


def _steps_beside(requests: Path) -> Path:
    return requests.with_name(f"{requests.stem}-steps.csv")


def _write_all(options: SimulateOptions, runs: Sequence[TrialRun], text: str) -> None:
    _write(options.json, lambda: document(runs))
    if len(runs) > 1:
        _write(options.csv, lambda: runs_csv(runs))
        if options.plot is not None:
            plots.plot_several(runs, options.plot)
    if options.out is not None:
        _write(options.out / "summary.txt", lambda: text)
        _write(options.out / "figures.json", lambda: document(runs))
        _write(options.out / "runs.csv", lambda: runs_csv(runs))
        if len(runs) > 1 and plots.are_possible():
            plots.plot_several(runs, options.out / "runs.svg")


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is not None:
        write(path, text())


def _folder_name(trial: SimulationTrial) -> str:
    at = "" if trial.rate is None else f"-rate{trial.rate:g}"
    return f"{trial.preset}{at}-seed{trial.seed}"
