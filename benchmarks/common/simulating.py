"""Simulated runs of a load, each of which must end without a problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from alignedserve.cli.simulate_once import settings_of
from alignedserve.simulator.records.records import RunRecord
from alignedserve.simulator.reports.trial import SimulationTrial
from alignedserve.simulator.run import Simulation


def recorded(simulation: Simulation) -> RunRecord:
    """Run the simulation and return its record."""
    simulation.run()
    record = simulation.record(0.0)
    assert not record.problems, record.problems[:3]
    return record


def record_of(trial: SimulationTrial) -> RunRecord:
    return recorded(Simulation(settings_of(trial)))


def save_load(path: Path, first_s: float, *streams: dict[str, Any]) -> str:
    """Write a workload of these streams, and return the name of its file."""
    path.write_text(yaml.safe_dump({"first_s": first_s, "streams": list(streams)}), encoding="utf-8")
    return str(path)
