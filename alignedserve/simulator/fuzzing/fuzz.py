"""Run a scenario, check its invariants, and return the verdict."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from alignedserve.simulator.fuzzing.invariants import BrokenRule, Failure, InvariantWatch, Rule
from alignedserve.simulator.fuzzing.recording import RunWriter, open_run
from alignedserve.simulator.fuzzing.scenario import Scenario
from alignedserve.simulator.run import Simulation


@dataclass(frozen=True)
class FuzzVerdict:
    seed: int
    failure: Failure | None
    digest: str  # over all commands of all cores, up to the failure
    num_requests: int
    num_events: int
    faults: Mapping[str, int]  # kind -> number of faults that happened

    def __str__(self) -> str:
        return "all is well" if self.failure is None else str(self.failure)


def attempt(scenario: Scenario) -> FuzzVerdict:
    simulation = _prepared(scenario)
    return _run(scenario, simulation)


def record(scenario: Scenario, path: Path) -> FuzzVerdict:
    """Run the scenario like `attempt`, and write the run to a file."""
    simulation = _prepared(scenario)
    with open_run(path, "w") as file:
        recorder = RunWriter(file, scenario, simulation.world.agenda)
        simulation.world.witnesses.append(recorder)
        verdict = _run(scenario, simulation)
        recorder.write_end(str(verdict), verdict.digest)
    return verdict


def _prepared(scenario: Scenario) -> Simulation:
    return Simulation(scenario.settings, [ask.arrival() for ask in scenario.asks])


def _run(scenario: Scenario, simulation: Simulation) -> FuzzVerdict:
    watch = InvariantWatch(scenario, simulation)
    simulation.world.witnesses.append(watch)
    with _no_refusals_logged():
        failure = _failure(simulation)
    return FuzzVerdict(
        seed=scenario.seed,
        failure=failure,
        digest=simulation.world.digest,
        num_requests=len(scenario.asks),
        num_events=watch.num_events,
        faults=dict(simulation.world.fault_counts),
    )


@contextmanager
def _no_refusals_logged() -> Iterator[None]:
    """Keep what members drop of forged frames out of the log: it is meant to be dropped."""
    log = logging.getLogger("alignedserve.links")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _failure(simulation: Simulation) -> Failure | None:
    agenda = simulation.world.agenda
    try:
        problems = simulation.run().problems
    except BrokenRule as broken:
        return broken.failure
    except Exception as error:  # an exception of a core ends its process: the fuzzer looks for them
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
        return Failure(Rule.NO_CRASH, f"{type(error).__name__}: {error!s:.200}, {where}", agenda.now)
    return Failure(Rule.CLEAN_END, "; ".join(problems), agenda.now) if problems else None
