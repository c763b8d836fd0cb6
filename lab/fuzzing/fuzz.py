"""Run a scenario, check its invariants, and return the verdict."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from alignedserve.lab.fuzzing.invariants import Failure, InvariantWatch, JobRules, Rule
from alignedserve.lab.fuzzing.recording import RunWriter, open_run
from alignedserve.lab.fuzzing.scenario import Scenario
from alignedserve.lab.loads.workload import Arrival
from alignedserve.lab.simulator.run import Simulation


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
    return _run(scenario, prepared(scenario))


def record(scenario: Scenario, path: Path) -> FuzzVerdict:
    """Run the scenario like `attempt`, and write the run to a file."""
    simulation = prepared(scenario)
    with open_run(path, "w") as file:
        recorder = RunWriter(file, scenario, simulation.world.agenda)
        simulation.world.witnesses.append(recorder)
        verdict = _run(scenario, simulation)
        recorder.write_end(str(verdict), verdict.digest)
    return verdict


def prepared(scenario: Scenario) -> Simulation:
    """Return the simulation of a scenario; it has not run yet."""
    asked = [ask.arrival() for ask in scenario.asks]
    return _with_jobs(scenario, asked) if scenario.jobs else Simulation(scenario.settings, asked)


def _with_jobs(scenario: Scenario, asked: list[Arrival]) -> Simulation:
    """Return a simulation with the job runner, which is no core: it is imported where there are jobs."""
    from alignedserve.lab.simulator.job_runner import JobRunnerSimulation
    from alignedserve.lab.simulator.job_users import SubmittedJob

    def breaks(what: str) -> None:
        raise Failure(Rule.JOBS, what, simulation.world.agenda.now)

    jobs = [
        SubmittedJob(job.name, job.at, tuple(line.arrival() for line in job.lines), job.window_s, job.cancel_at)
        for job in scenario.jobs
    ]
    simulation = JobRunnerSimulation(scenario.settings, asked, jobs, scenario.most_open_lines, JobRules(breaks))
    return simulation


def _run(scenario: Scenario, simulation: Simulation) -> FuzzVerdict:
    watch = InvariantWatch(scenario, simulation)
    simulation.world.witnesses.append(watch)
    with _not_logged("alignedserve.links"), _not_logged("alignedserve.policy"), _heard_of_jobs() as errors:
        failure = _failure(simulation)
    if failure is None and errors:
        failure = Failure(Rule.NO_CRASH, f"the job runner logs {errors[0]}", simulation.world.agenda.now)
    return FuzzVerdict(
        seed=scenario.seed,
        failure=failure,
        digest=simulation.world.digest,
        num_requests=len(scenario.asks),
        num_events=watch.num_events,
        faults=dict(simulation.world.fault_counts),
    )


@contextmanager
def _not_logged(name: str) -> Iterator[None]:
    """Keep out of the log what members drop of forged frames, as they should, and what the verdict says of policies."""
    log = logging.getLogger(name)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _JobErrors(logging.Handler):
    """Keeps the exceptions that are logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.kept.append(f"{record.getMessage()}: {record.exc_info[1]!r:.200}")


@contextmanager
def _heard_of_jobs() -> Iterator[list[str]]:
    """Yield the exceptions that the job runner logs: it survives them all. Its other lines are not shown."""
    log, errors = logging.getLogger("alignedserve.jobs"), _JobErrors()
    log.addHandler(errors)
    before, log.propagate = log.propagate, False
    try:
        yield errors.kept
    finally:
        log.removeHandler(errors)
        log.propagate = before


def _failure(simulation: Simulation) -> Failure | None:
    agenda = simulation.world.agenda
    try:
        simulation.run()
    except Failure as failure:
        return failure
    except Exception as error:  # an exception of a core ends its process: the fuzzer looks for them
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
        return Failure(Rule.NO_CRASH, f"{type(error).__name__}: {error!s:.200}, {where}", agenda.now)
    if simulation.problems:
        return Failure(Rule.CLEAN_END, "; ".join(simulation.problems), agenda.now)
    return None
