"""`alignedserve simulate`: runs a workload through a deployment in virtual time, and reports the figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from alignedserve.cli.terminal.arguments import check_writable
from alignedserve.errors import SimulateError, file_errors
from alignedserve.lab.cli.flags import OutputFlags, RunFlags
from alignedserve.lab.fuzzing.recording import first_difference, read_trial, repeated, tell
from alignedserve.lab.loads.figures.tables import write
from alignedserve.lab.loads.records import record_file
from alignedserve.lab.loads.records.records import RunRecord
from alignedserve.lab.processes import processes
from alignedserve.lab.reports import plots
from alignedserve.lab.reports.report import comparison_text, document, requests_csv, runs_csv, steps_csv, summary
from alignedserve.lab.reports.timeline import timeline
from alignedserve.lab.reports.trial import OnProgress, SimulationTrial, TrialRun, trials
from alignedserve.lab.trials.building import check_rates, settings_of, trial_of
from alignedserve.lab.trials.running import run_filmed, run_once, run_saved
from alignedserve.progress import ProgressBar

_WRONG = 1  # the simulation found something wrong with itself


def run(asked: RunFlags, presets: Sequence[str], files: OutputFlags) -> int:
    how = asked.cluster, asked.profile, asked.transport, asked.gateway_ms, asked.settings
    common = trial_of(presets, asked.workload, *how)
    planned = trials(common, presets, asked.seeds or (asked.seed,), asked.rates or ())
    check_rates(common, asked.rates or ())
    _check(files, planned)
    with _folder(files.out):
        _check_files(files, alone=len(planned) == 1)
        runs = _all(files, planned, asked.jobs)
        text = summary(runs[0]) if len(runs) == 1 else comparison_text(runs)
        _write_all(files, runs, text)  # before the text: its reader may leave early
    print(text, end="")
    return _complain(runs)


def _all(files: OutputFlags, planned: Sequence[SimulationTrial], jobs: int | None) -> list[TrialRun]:
    if len(planned) == 1:
        with ProgressBar(planned[0].name, sys.stderr) as progress:
            return [_run_trial(files, planned[0], alone=True, on_progress=progress.show)]
    found: dict[SimulationTrial, TrialRun] = {}
    with ProgressBar("runs", sys.stderr) as progress, processes(jobs) as started:
        for run in started.as_done(partial(_run_of_many, files), planned):
            found[run.trial] = run
            progress.show(len(found), len(planned))
    return [found[trial] for trial in planned]


def _run_of_many(files: OutputFlags, trial: SimulationTrial) -> TrialRun:
    return _run_trial(files, trial, alone=False, on_progress=lambda _ended, _all_requests: None)


def _run_trial(files: OutputFlags, trial: SimulationTrial, alone: bool, on_progress: OnProgress) -> TrialRun:
    """Run the trial and write its record; only the figures are kept of it, since there may be many runs."""
    record = _record_of(files, trial, on_progress)
    if alone:
        _write_single(files, trial, record)
    if files.out is not None:
        _write_folder(files.out if alone else files.out / _folder_name(trial), trial, record, files.timeline_limit)
    return TrialRun.from_record(trial, record)


def _record_of(files: OutputFlags, trial: SimulationTrial, on_progress: OnProgress) -> RunRecord:
    if files.save is not None:
        return run_saved(trial, on_progress, files.save)
    if files.page is not None:
        return run_filmed(trial, on_progress, files.page)
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
    with ProgressBar(trial.name, sys.stderr) as progress:
        found = repeated(saved, lambda again: run_saved(trial, progress.show, again), read_trial)
    return tell(found)


def diff(first: Path, second: Path) -> int:
    return tell(first_difference(first, second, read_trial), str(first), str(second))


# --- Before the first run


def _check(files: OutputFlags, planned: Sequence[SimulationTrial]) -> None:
    """Refuse options that cannot work, before anything runs."""
    for trial in planned:
        settings_of(trial)
    single = {"--timeline": files.timeline, "--record": files.record, "--save": files.save, "--page": files.page}
    if len(planned) > 1 and any(single.values()):
        flag = next(flag for flag, path in single.items() if path)
        raise SimulateError(f"{flag} takes a single run, these are {len(planned)}: --out writes files for each")
    if files.save is not None and files.page is not None:
        raise SimulateError("--save and --page write a run each: leave one of them out")
    if files.plot is not None:
        plots.check(files.plot)


def _check_files(files: OutputFlags, alone: bool) -> None:
    named = [files.json, files.csv, _steps_beside(files.csv) if files.csv and alone else None]
    paths = [path for path in (*named, files.plot, files.timeline, files.record, files.save, files.page) if path]
    for path in paths:
        check_writable(path)
    if len({path.resolve() for path in paths}) < len(paths):
        raise SimulateError("two of the files to write have one name")


@contextmanager
def _folder(path: Path | None) -> Iterator[None]:
    """Make the folder where it is missing; what was made is removed again if nothing was written to it."""
    missing = [folder for folder in (path, *path.parents) if not os.path.exists(folder)] if path else []
    try:
        if path is not None:
            with file_errors(SimulateError, f"--out {path}", "made"):
                path.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


# --- What is written


def _write_single(files: OutputFlags, trial: SimulationTrial, record: RunRecord) -> None:
    _write(files.csv, lambda: requests_csv(record))
    _write(files.csv and _steps_beside(files.csv), lambda: steps_csv(record))
    _write(files.timeline, lambda: timeline(record, files.timeline_limit))
    if files.record is not None:
        record_file.save(record, files.record)
    if files.plot is not None:
        plots.plot_run(record, trial.title, files.plot)


def _write_folder(folder: Path, trial: SimulationTrial, record: RunRecord, timeline_s: float) -> None:
    with _folder(folder):
        _write(folder / "requests.csv", lambda: requests_csv(record))
        _write(folder / "steps.csv", lambda: steps_csv(record))
        _write(folder / "timeline.json", lambda: timeline(record, timeline_s))
        if plots.are_possible():
            plots.plot_run(record, trial.title, folder / "run.svg")


def _steps_beside(requests: Path) -> Path:
    return requests.with_name(f"{requests.stem}-steps.csv")


def _write_all(files: OutputFlags, runs: Sequence[TrialRun], text: str) -> None:
    _write(files.json, lambda: document(runs))
    if len(runs) > 1:
        _write(files.csv, lambda: runs_csv(runs))
        if files.plot is not None:
            plots.plot_several(runs, files.plot)
    if files.out is not None:
        _write(files.out / "summary.txt", lambda: text)
        _write(files.out / "figures.json", lambda: document(runs))
        _write(files.out / "runs.csv", lambda: runs_csv(runs))
        if len(runs) > 1 and plots.are_possible():
            plots.plot_several(runs, files.out / "runs.svg")


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is not None:
        write(path, text())


def _folder_name(trial: SimulationTrial) -> str:
    at = "" if trial.rate is None else f"-rate{trial.rate:g}"
    return f"{trial.preset}{at}-seed{trial.seed}"
