"""`alignedserve simulate`: runs a workload through a deployment in virtual time, and says what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from alignedserve.cli.simulate_once import run_once, run_saved, settings_of
from alignedserve.cli.terminal.arguments import check_writable
from alignedserve.cli.terminal.progress import Progress
from alignedserve.errors import SimulateError
from alignedserve.simulator.fuzzing.recording import Difference, first_difference, read_trial, said
from alignedserve.simulator.records import record_file
from alignedserve.simulator.records.records import RunRecord
from alignedserve.simulator.reports import plots
from alignedserve.simulator.reports.report import comparison_text, document, requests_csv, runs_csv, steps_csv, summary
from alignedserve.simulator.reports.timeline import timeline
from alignedserve.simulator.reports.trial import OnProgress, SimulationTrial, TrialRun, trials
from alignedserve.simulator.workload.spec import rate_of

_WRONG = 1  # the simulation found something wrong with itself
_DIFFERENT = 1  # so are two runs


@dataclass(frozen=True)
class Options:
    common: SimulationTrial  # what all runs share; its preset, seed and rate do not count
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


def run(options: Options) -> int:
    planned = trials(options.common, options.presets, options.seeds, options.rates)
    _check(options, planned)
    with _folder(options.out):
        _check_files(options, alone=len(planned) == 1)
        runs = _all(options, planned)
        text = summary(runs[0]) if len(runs) == 1 else comparison_text(runs)
        _write_all(options, runs, text)  # before the text: whoever reads it may leave early
    print(text, end="")
    return _complain(runs)


def _all(options: Options, planned: Sequence[SimulationTrial]) -> list[TrialRun]:
    runs = []
    for number, trial in enumerate(planned):
        with Progress(f"{number + 1}/{len(planned)} {trial.name}", sys.stderr) as progress:
            runs.append(_one(options, trial, alone=len(planned) == 1, on_progress=progress.show))
    return runs


def _one(options: Options, trial: SimulationTrial, alone: bool, on_progress: OnProgress) -> TrialRun:
    """Its record is written and let go: of many runs only the figures are kept."""
    record = run_once(trial, on_progress) if options.save is None else run_saved(trial, on_progress, options.save)
    if alone:
        _write_single(options, trial, record)
    if options.out is not None:
        _write_folder(options.out if alone else options.out / _folder_name(trial), trial, record, options.timeline_s)
    return TrialRun.of(trial, record)


def _complain(runs: Sequence[TrialRun]) -> int:
    wrong = [(one.trial.name, problem) for one in runs for problem in one.problems]
    for name, problem in wrong[:3]:
        print(f"alignedserve: {name}: {problem}", file=sys.stderr)
    if wrong[3:]:
        print(f"alignedserve: and {len(wrong) - 3} more problems", file=sys.stderr)
    return _WRONG if wrong else 0


# --- Saved runs


def replay(saved: Path) -> int:
    """0 where every command of every part is the same, byte for byte; 1 otherwise, as for `diff`."""
    trial = read_trial(saved)
    with TemporaryDirectory() as folder, Progress(trial.name, sys.stderr) as progress:
        again = Path(folder) / f"again{saved.suffix}"
        run_saved(trial, progress.show, again)
        found = first_difference(saved, again, read_trial)
    return _tell(found, "saved", "this time")


def diff(one: Path, other: Path) -> int:
    return _tell(first_difference(one, other, read_trial), str(one), str(other))


def _tell(found: Difference | int, one: str, other: str) -> int:
    print(said(found, one, other))
    return 0 if isinstance(found, int) else _DIFFERENT


# --- Before the first run


def _check(options: Options, planned: Sequence[SimulationTrial]) -> None:
    """What cannot be is said before anything runs."""
    said = rate_of(options.common.workload or "")
    if options.rates and said:
        raise SimulateError(f"--rates takes the place of {said} in --workload: leave one of them out")
    for trial in planned:
        settings_of(trial)
    single = {"--timeline": options.timeline, "--record": options.record, "--save": options.save}
    if len(planned) > 1 and any(single.values()):
        flag = next(flag for flag, path in single.items() if path)
        raise SimulateError(f"{flag} takes a single run, these are {len(planned)}: --out writes files for each")
    if options.plot is not None:
        plots.check(options.plot)


def _check_files(options: Options, alone: bool) -> None:
    named = [options.json, options.csv, options.csv and alone and _steps_beside(options.csv)]
    files = [path for path in (*named, options.plot, options.timeline, options.record, options.save) if path]
    for path in files:
        check_writable(path)
    if len({path.resolve() for path in files}) < len(files):
        raise SimulateError("two of the files to write have one name")


@contextmanager
def _folder(path: Path | None) -> Iterator[None]:
    """Made where it is missing; where nothing was written to it, what was made goes again."""
    missing = [one for one in (path, *path.parents) if not os.path.exists(one)] if path else []
    try:
        if path is not None:
            _make(path)
        yield
    finally:
        for one in missing:
            with suppress(OSError):  # it is not empty
                one.rmdir()


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimulateError(f"--out {path} cannot be made: {error.strerror}") from None


# --- What is written


def _write_single(options: Options, trial: SimulationTrial, record: RunRecord) -> None:
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


def _write_all(options: Options, runs: Sequence[TrialRun], text: str) -> None:
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


def _plot_several(runs: Sequence[TrialRun], path: Path) -> None:
    is_sweep = len({one.trial.rate for one in runs}) > 1
    (plots.plot_sweep if is_sweep else plots.plot_comparison)(runs, path)


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise SimulateError(f"{path} cannot be written: {error.strerror}") from None


def _folder_name(trial: SimulationTrial) -> str:
    at = "" if trial.rate is None else f"-rate{trial.rate:g}"
    return f"{trial.preset}{at}-seed{trial.seed}"
