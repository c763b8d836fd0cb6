"""Simulates from Python: the same workloads, deployments and settings as the command `alignedserve simulate` takes.

what is given ──▶ a trial, and objects that no words can say ──▶ lab/trials, as for the command ──▶ a run
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias

from alignedserve.api.deployment import Setting, text_of
from alignedserve.config.presets import DEFAULT
from alignedserve.config.topology import Topology
from alignedserve.errors import SimulateError
from alignedserve.lab.api.simulated_run import Frame, SimulatedRun, frame_of
from alignedserve.lab.loads import defaults
from alignedserve.lab.loads.figures import tables
from alignedserve.lab.loads.workload import Mixture
from alignedserve.lab.loads.workload.build import build
from alignedserve.lab.loads.workload.stream import Stream
from alignedserve.lab.loads.workload.table import Table, trace_of
from alignedserve.lab.processes import processes
from alignedserve.lab.reports import plots, report
from alignedserve.lab.reports.trial import OnProgress, SimulationTrial, TrialRun, trials
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.trials.building import check_rates, settings_of, trial_of
from alignedserve.lab.trials.running import finished
from alignedserve.progress import ProgressBar

Workload: TypeAlias = str | Path | Mixture | Stream | Table
Transport: TypeAlias = Literal["host", "direct"]

_NO_WORDS = "given"  # stands for a workload that is an object


def simulate(
    workload: Workload = defaults.WORKLOAD,
    *,
    preset: str = DEFAULT,
    cluster: str | Topology | None = None,
    profile: str | Path = defaults.PROFILE,
    transport: Transport | None = None,
    seed: int = 0,
    rate: float | None = None,
    gateway_ms: float = 0.0,
    settings: Mapping[str, Setting] | None = None,
    shows: bool = True,
) -> SimulatedRun:
    """Run a workload through a whole deployment in virtual time.

    Each keyword is a flag of `alignedserve simulate` and takes its words; `settings` are those of its --set. A
    workload may also be an object, a table of requests, or the tree of a workload's file.
    On a terminal a bar shows the progress. Raises an AlignedServeError of one line where something cannot be.
    """
    common, given = _common(workload, cluster, profile, transport, gateway_ms, settings or {}, [preset])
    [trial] = _trials(common, [preset], [seed], [] if rate is None else [rate])
    simulation = Simulation(settings_of(trial, given))
    with _bar(trial.name, shows) as on_progress:
        return SimulatedRun(trial, given, finished(simulation, on_progress), simulation)


@dataclass(frozen=True)
class System:
    """A preset, and settings in it, that a comparison shows under a name."""

    name: str
    preset: str = DEFAULT
    settings: Mapping[str, Setting] = field(default_factory=dict)


AnySystem: TypeAlias = str | System


def compare(
    systems: AnySystem | Sequence[AnySystem],
    workload: Workload = defaults.WORKLOAD,
    *,
    seeds: Sequence[int] = (0,),
    rates: Sequence[float] = (),
    cluster: str | Topology | None = None,
    profile: str | Path = defaults.PROFILE,
    transport: Transport | None = None,
    gateway_ms: float = 0.0,
    settings: Mapping[str, Setting] | None = None,
    jobs: int | None = None,
    shows: bool = True,
) -> Comparison:
    """Run systems over the same arrivals, each seed and each rate once, in as many processes as cores.

    A system is the name of a preset, or a `System`.
    """
    one_or_more = systems if isinstance(systems, Sequence) and not isinstance(systems, str) else [systems]
    named = _named([it if isinstance(it, System) else System(it, it) for it in one_or_more])
    presets = [system.preset for system in named.values()]
    common, given = _common(workload, cluster, profile, transport, gateway_ms, settings or {}, presets)
    orders = [
        _ComparedRun(trial, _of_system(trial, named[trial.preset]), given)
        for trial in _trials(common, [*named], seeds, rates)
    ]
    for order in orders:
        settings_of(order.trial, order.given)
    found: dict[SimulationTrial, TrialRun] = {}
    with _bar("runs", shows) as on_progress, processes(_jobs(jobs, given)) as started:
        for run in started.as_done(_figures, orders):
            found[run.trial] = run
            on_progress(len(found), len(orders))
    return Comparison([found[order.shown] for order in orders])


@dataclass(frozen=True, repr=False)
class Comparison:
    """The figures of several runs. Printed, it is the table of `alignedserve simulate --compare`."""

    all_figures: list[TrialRun]

    def __repr__(self) -> str:
        return report.comparison_text(self.all_figures)

    @cached_property
    def runs(self) -> Frame:
        """Return a row for each run, with the columns of --csv: what was run, and every figure."""
        return frame_of(report.RUN_TITLES, map(report.run_row, self.all_figures))

    @property
    def problems(self) -> list[str]:
        """Return what simulations found wrong with themselves: a run with any proves nothing."""
        return [f"{run.trial.name}: {problem}" for run in self.all_figures for problem in run.problems]

    def json(self, path: str | Path) -> None:
        """Write all figures of all runs."""
        tables.write(Path(path), report.document(self.all_figures))

    def plot(self, path: str | Path) -> None:
        """Draw a .png or .svg: attainment against the rate, or bars; this needs matplotlib."""
        plots.check(Path(path))
        plots.plot_several(self.all_figures, Path(path))


@dataclass(frozen=True)
class _ComparedRun:
    """A run of a comparison, as a process gets it."""

    shown: SimulationTrial  # with the system's name in place of its preset
    trial: SimulationTrial
    given: Mixture | None


def _figures(order: _ComparedRun) -> TrialRun:
    record = finished(Simulation(settings_of(order.trial, order.given)), lambda _ended, _all: None)
    return TrialRun.from_record(order.shown, record)


# --- From what is given to trials


def _common(
    workload: Workload,
    cluster: str | Topology | None,
    profile: str | Path,
    transport: Transport | None,
    gateway_ms: float,
    settings: Mapping[str, Setting],
    presets: Sequence[str],
) -> tuple[SimulationTrial, Mixture | None]:
    """Return what the runs share, and their workload where it is an object."""
    mixture = _mixture(workload)
    words = str(workload) if mixture is None else _NO_WORDS
    where = None if cluster is None else str(cluster)
    gateway_ms = _number("gateway_ms", gateway_ms)
    return trial_of(presets, words, where, str(profile), transport, gateway_ms, _options(settings)), mixture


def _options(settings: Mapping[str, Setting]) -> list[str]:
    return [f"{path}={text_of(value)}" for path, value in settings.items()]


def _of_system(trial: SimulationTrial, system: System) -> SimulationTrial:
    """Return the trial with the preset and the settings of the system, whose name it has."""
    return replace(trial, preset=system.preset, options=(*trial.options, *_options(system.settings)))


def _mixture(workload: Workload) -> Mixture | None:
    """Return the workload that is no words."""
    match workload:
        case str() | Path():
            return None
        case Mixture():
            return workload
        case Stream():
            return Mixture((workload,))
        case Mapping() if "streams" in workload:
            return build(dict(workload), "workload", Path())
        case _:
            return trace_of(workload)


def _trials(
    common: SimulationTrial, names: Sequence[str], seeds: Sequence[int], rates: Sequence[float]
) -> list[SimulationTrial]:
    for seed in seeds:
        if not isinstance(seed, int) or seed < 0:
            raise SimulateError(f"a seed must be a whole number of 0 or more, not {seed!r:.40}")
    check_rates(common, rates)
    return trials(common, names, _once("seeds", seeds), _once("rates", [_number("a rate", rate) for rate in rates]))


def _number(what: str, value: float) -> float:
    if not isinstance(value, int | float) or not (isfinite(value) and value >= 0):
        raise SimulateError(f"{what} must be a number of 0 or more, not {value!r:.40}")
    return float(value)


def _once(what: str, values: Sequence[Any]) -> Sequence[Any]:
    if twice := [value for value, times in Counter(values).items() if times > 1]:
        raise SimulateError(f"{what} has {twice[0]!r:.40} twice")
    return values


def _named(systems: Sequence[System]) -> dict[str, System]:
    if not systems:
        raise SimulateError("name at least one system to run, such as aligned")
    _once("systems", [system.name for system in systems])
    return {system.name: system for system in systems}


def _jobs(wanted: int | None, given: Mixture | None) -> int | None:
    """Return the number of processes, if it matters: one where they would not know what is defined in a script."""
    if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
        raise SimulateError(f"jobs must be a whole number of 1 or more, not {wanted!r:.40}")
    if _travels(given):
        return wanted
    if wanted is None or wanted == 1:
        return 1
    raise SimulateError(
        "what is defined in a script or a notebook runs in one process: leave jobs out, or move it to a file of its own"
    )


def _travels(given: Mixture | None) -> bool:
    """Return whether another process knows all that the workload is made of."""
    try:
        return b"__main__" not in pickle.dumps(given)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


@contextmanager
def _bar(label: str, shows: bool) -> Iterator[OnProgress]:
    with ProgressBar(label, sys.stderr) as bar:
        nothing: Callable[[int, int], None] = lambda _done, _all: None  # noqa: E731
        yield bar.show if shows else nothing
