"""Batch jobs beside chats, with the real job runner: windows are kept, and an impossible window is known early."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import yaml

from alignedserve.core import Request, Sampling, ServiceClass, Slo
from alignedserve.jobs.messages import JobCommand, JobEvent, PublishForecasts
from alignedserve.lab.benchmarks.common.machines import MACHINES, save_profile
from alignedserve.lab.loads.workload import Arrival, arrivals
from alignedserve.lab.loads.workload.tape import STOP, words
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.job_runner import JobRunnerSimulation
from alignedserve.lab.simulator.job_users import SubmittedJob
from alignedserve.lab.simulator.settings import FIRST_ARRIVAL_AT, gateways_of
from alignedserve.lab.trials.building import settings_of
from alignedserve.store.job import Job, JobStatus
from tests.rare import rare

pytestmark = rare  # tests/jobs/test_state.py tries the same of the job runner alone

CHATS_S = 6.9  # 60 % of what this worker serves where chats are all that it has


class Forecasts:
    """Hears when the job runner first says of a job that it will be late."""

    def __init__(self) -> None:
        self.late_at: dict[str, float] = {}

    def begins_life(self) -> None: ...

    def told(self, event: JobEvent, simulation: JobRunnerSimulation, /) -> None: ...

    def ordered(self, command: JobCommand, simulation: JobRunnerSimulation, /) -> None:
        if isinstance(command, PublishForecasts):
            for job, forecast in command.forecasts.items():
                if forecast.is_late:
                    self.late_at.setdefault(job, forecast.at)


def submitted(name: str, lines: int, window_s: int, weight: float = 1.0) -> SubmittedJob:
    """Return a job whose lines have prompts of 64 to 128 tokens and outputs of 16 to 48."""
    draw = Random(name)

    def line() -> Arrival:
        request = Request(
            id="line",
            owner="jobs-0",
            attempt=0,
            prompt=words(draw, draw.randint(64, 128)),
            emitted=(),
            sampling=Sampling(seed=draw.getrandbits(31)),
            max_tokens=48,
            stop_tokens=(STOP,),
            service=ServiceClass.BE,
            slo=Slo(),
            arrival_at=0.0,
        )
        return Arrival(request, draw.randint(16, 48), None)

    return SubmittedJob(name, FIRST_ARRIVAL_AT, tuple(line() for _ in range(lines)), window_s, weight=weight)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> JobRunnerSimulation:
    """Run three jobs that take most of what chats leave, those with later deadlines first and heavier; and a fourth job
    that alone would take three times as much, with the nearest deadline of all.
    """
    folder = tmp_path_factory.mktemp("jobs")
    profile, workload = folder / "steps.json", folder / "chats.yaml"
    save_profile(profile, MACHINES["usual"])
    chats = {"name": "chat", "kind": "sizes", "prompt": "32-256", "output": "16-96", "max_tokens": 96}
    promised = {"rate": CHATS_S, "ttft_s": 1.0, "tbt_s": 0.1875}
    workload.write_text(yaml.safe_dump({"first_s": 75.0, "streams": [chats | promised]}))
    jobs = [
        submitted("hopeless", 900, 45, weight=10),
        submitted("later", 70, 80, weight=5),
        submitted("middle", 60, 64),
        submitted("soon", 100, 48),
    ]
    usual = settings_of(SimulationTrial("aligned", str(workload), profile=str(profile)))
    settings = replace(usual, has_job_runner=True)
    asked = arrivals(settings.workload, gateways_of(settings), settings.seed, FIRST_ARRIVAL_AT)
    simulation = JobRunnerSimulation(settings, asked, jobs, 256, Forecasts())
    simulation.run()
    assert simulation.problems == []
    return simulation


def ended(run: JobRunnerSimulation, name: str) -> Job:
    return run.users.ended[name]


@pytest.mark.parametrize("name", ["soon", "middle", "later"])
def test_three_windows_are_kept_beside_chats_at_60_per_cent(run: JobRunnerSimulation, name: str) -> None:
    job = ended(run, name)
    assert job.status is JobStatus.COMPLETED
    assert job.completed_at is not None
    assert job.completed_at < job.expires_at
    assert job.counts.completed == job.total


def test_a_job_that_cannot_be_kept_says_so_early_and_expires_with_what_is_done(run: JobRunnerSimulation) -> None:
    hopeless = ended(run, "hopeless")
    assert hopeless.status is JobStatus.EXPIRED
    assert isinstance(run.witness, Forecasts)
    assert run.witness.late_at["hopeless"] - hopeless.created_at < 0.3 * 45
    assert 0 < hopeless.counts.completed < hopeless.total


def test_and_chats_get_what_they_were_promised(run: JobRunnerSimulation) -> None:
    assert RunFigures.from_record(run.record(1.0)).at("rt.attainment") > 0.99
