"""Runs a trial: `run_once(trial, on_progress) -> RunRecord`."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from alignedserve.dashboard.page import recorded_page
from alignedserve.errors import SimulateError
from alignedserve.lab.fuzzing.recording import RunWriter, open_run
from alignedserve.lab.reports.trial import OnProgress, SimulationTrial, TrialRun
from alignedserve.lab.trials.building import NOTHING_GIVEN, GivenObjects, settings_of
from alignedserve.lab.trials.filming import Film
from alignedserve.loads.figures.tables import write
from alignedserve.loads.records.records import RunRecord
from alignedserve.simulator.run import Simulation


def run_once(trial: SimulationTrial, on_progress: OnProgress) -> RunRecord:
    return finished(Simulation(settings_of(trial)), on_progress)


def figures_of(trial: SimulationTrial) -> TrialRun:
    return TrialRun.from_record(trial, run_once(trial, lambda _ended, _all_requests: None))


def run_filmed(
    trial: SimulationTrial, on_progress: OnProgress, page: Path, given: GivenObjects = NOTHING_GIVEN
) -> RunRecord:
    """Run the trial and write the page that shows it, with a slider of its time."""
    simulation = Simulation(settings_of(trial, given))
    film = Film(simulation, trial.title)
    record = finished(simulation, on_progress)
    write(page, recorded_page(film.pictures))
    return record


def run_saved(trial: SimulationTrial, on_progress: OnProgress, path: Path) -> RunRecord:
    """Run the trial and write every command of every core to a file."""
    simulation = Simulation(settings_of(trial))
    world = simulation.world
    with open_run(path, "w") as file:
        recorder = RunWriter(file, trial, world.agenda)
        world.witnesses.append(recorder)
        world.is_noted = True
        record = finished(simulation, on_progress)
        recorder.write_end(f"{len(record.requests)} requests, {len(record.problems)} problems", world.digest)
    return record


def finished(simulation: Simulation, on_progress: OnProgress) -> RunRecord:
    """Run the simulation to its end."""
    simulation.clients.on_progress = on_progress
    began_at = perf_counter()
    simulation.run()
    record = simulation.record(perf_counter() - began_at)
    if not record.requests:
        raise SimulateError("--workload: no request comes in it")
    return record
