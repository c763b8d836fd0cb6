"""Simulated runs of a load; each must end without a problem."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import yaml

from alignedserve.lab.loads.records.records import RunRecord
from alignedserve.lab.processes import ONE_THREAD
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.trials.building import settings_of
from alignedserve.machine.resources import usable_cores

R = TypeVar("R")
T = TypeVar("T")


def recorded(simulation: Simulation) -> RunRecord:
    """Run the simulation and return its record."""
    simulation.run()
    record = simulation.record(0.0)
    assert not record.problems, record.problems[:3]
    return record


def record_of(trial: SimulationTrial) -> RunRecord:
    return recorded(Simulation(settings_of(trial)))


def figure_of_each(figure: Callable[[RunRecord], R], trials: Iterable[SimulationTrial]) -> list[R]:
    """Return the figure of each trial's record; there is a process for each core, which finds it by its name."""
    return of_each(partial(_figure_of, figure), trials)


def of_each(function: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """Return the function of each value, from a process for each core, which finds the function by its name.

    The processes end with the call: who has some left waits for them at his own end. Those of lab/processes.py do not
    know what is defined in the program that is run, as figures are here."""
    values = [*values]
    if len(values) < 2:
        return [*map(function, values)]
    os.environ |= ONE_THREAD  # of numpy: a second one would only take a core from another process
    with ProcessPoolExecutor(min(len(values), max(1, round(usable_cores()))), get_context("spawn")) as processes:
        return list(processes.map(function, values))


def _figure_of(figure: Callable[[RunRecord], R], trial: SimulationTrial) -> R:
    return figure(record_of(trial))


def save_load(path: Path, first_s: float, *streams: dict[str, Any]) -> str:
    """Write a workload of these streams, and return the name of its file."""
    path.write_text(yaml.safe_dump({"first_s": first_s, "streams": list(streams)}), encoding="utf-8")
    return str(path)
