"""Tests of the loss of the head, and with it of Ray, the gateway and the router: batch jobs go on with the next
head, and what lay in shared memory is removed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.conftest import clustered, deployed_on
from tests.end_to_end.client import check_greedy, mixed
from tests.end_to_end.deployment import Deployment, shared_memory, wait_until
from tests.end_to_end.patient import Patient
from tests.rare import rare

HEAD, WORKER = {"CPU": 0}, {"CPU": 4, "decode": 1}
LINES = 40
DONE_S = 120.0


@rare
def test_after_the_head_is_lost_a_job_goes_on_with_the_next_one(tmp_path: Path) -> None:
    wanted = mixed(LINES, seed=7, prompts=(3, 200), outputs=(20, 80))
    jobs = ("--jobs-directory", str(tmp_path / "jobs"))
    with shared_memory() as memory:
        with clustered(HEAD, WORKER) as nodes:
            flags = ("--ray-address", nodes.address, *jobs)
            first = Deployment(*flags, launcher="ray", memory=memory, environment=nodes.environment)
            id = Patient(first).submit(wanted)

            def num_done() -> int:
                return int(Patient(first).look(id)["request_counts"]["completed"])

            wait_until(lambda: num_done() > 3, DONE_S, first.log)
            assert num_done() < LINES
            first.kill()  # loses all of the head at once
            first.forget()
        assert any(memory.iterdir()), "nobody was there to remove them"
        with clustered(HEAD, WORKER) as nodes, deployed_on(nodes, "colocated", *jobs, memory=memory) as second:
            patient = Patient(second)
            wait_until(lambda: patient.look(id)["status"] == "completed", DONE_S, second.log)
            batch = patient.look(id)
            assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
            rows = patient.ask("GET", f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in map(json.loads, rows)}
    assert len(rows) == len(answers) == LINES
    check_greedy(wanted, [answers[str(number)]["token_ids"] for number in range(LINES)])
