"""Tests that batches go on after the machine of a whole deployment has lost its power."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.end_to_end.client import check_greedy, command, mixed
from tests.end_to_end.deployment import ANSWER_S, Deployment, deployed, shared_memory, wait_until
from tests.end_to_end.patient import Patient
from tests.power_cut import Power
from tests.rare import rare

LINES, MOST_BEFORE = 20, 15
DIRECTORY = "ALIGNEDSERVE_JOBS_DIRECTORY"
FLAGS = ("--max-batch", "4")


@rare  # tests/store cuts the power of the store alone, at many moments
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_goes_on_after_a_power_cut(tmp_path: Path, seed: int) -> None:
    draw, wanted = Random(seed), mixed(LINES, seed, prompts=(3, 200), outputs=(20, 60))
    (disk := tmp_path / "disk").mkdir()
    power, after = Power(disk, tmp_path / "power"), tmp_path / "after"
    with shared_memory() as memory:
        deployment = Deployment(*FLAGS, memory=memory, environment={**power.environment, DIRECTORY: str(disk / "jobs")})
        try:
            patient, num_done = Patient(deployment), draw.randint(0, MOST_BEFORE)
            id = patient.submit(wanted)
            wait_until(lambda: patient.look(id)["request_counts"]["completed"] >= num_done, ANSWER_S, deployment.log)
        finally:
            with power.no_turn():
                deployment.kill()
            deployment.forget()
    *_, last = power.moments()
    last.cut(after, draw)
    checked = command("store", "check", "--jobs-directory", after / "jobs")
    assert checked.returncode == 0, checked.stdout
    with deployed(*FLAGS, environment={DIRECTORY: str(after / "jobs")}) as deployment:
        patient = Patient(deployment)
        assert patient.look(id)["request_counts"]["completed"] >= num_done
        wait_until(lambda: patient.look(id)["status"] == "completed", ANSWER_S, deployment.log)
        rows = patient.rows(patient.look(id))
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in rows}
    assert len(rows) == len(answers) == LINES
    check_greedy(wanted, [answers[str(number)]["token_ids"] for number in range(LINES)])
