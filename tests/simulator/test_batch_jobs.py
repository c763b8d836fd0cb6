"""Batch jobs beside chats, with the cores that serve: windows are kept, and an impossible window is known early."""

from __future__ import annotations

from functools import partial

import pytest
import yaml

from alignedserve.lab.benchmarks.common.machines import MACHINES, save_profile
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.trials.batch_jobs import JobsSimulation, Submission
from alignedserve.lab.trials.building import settings_of
from alignedserve.store.job import JobStatus

CHATS_S = 6.9  # 60 % of what this worker serves where chats are all that it has: `python -m lab.benchmarks.windows`
short = partial(Submission, prompt=(64, 128), output=(16, 48))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> JobsSimulation:
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
        short("hopeless", 900, 45, weight=10),
        short("later", 70, 80, weight=5),
        short("middle", 60, 64),
        short("soon", 100, 48),
    ]
    simulation = JobsSimulation(settings_of(SimulationTrial("aligned", str(workload), profile=str(profile))), jobs)
    simulation.run()
    assert simulation.problems == []
    return simulation


@pytest.mark.parametrize("name", ["soon", "middle", "later"])
def test_three_windows_are_kept_beside_chats_at_60_per_cent(run: JobsSimulation, name: str) -> None:
    progress = run.progress[name]
    assert progress.job.status is JobStatus.COMPLETED
    assert progress.left_s > 0
    assert progress.job.counts.completed == progress.job.total


def test_a_job_that_cannot_be_kept_says_so_early_and_expires_with_what_is_done(run: JobsSimulation) -> None:
    hopeless = run.progress["hopeless"]
    assert hopeless.job.status is JobStatus.EXPIRED
    assert hopeless.late_after_s is not None
    assert hopeless.late_after_s < 0.3 * 45
    assert 0 < hopeless.job.counts.completed < hopeless.job.total


def test_and_chats_get_what_they_were_promised(run: JobsSimulation) -> None:
    assert RunFigures.from_record(run.record(1.0)).at("rt.attainment") > 0.99
