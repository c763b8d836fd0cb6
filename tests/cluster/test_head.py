"""Tests of the loss of the head, and with it of Ray, the gateway and the router: batch jobs go on with the next
head, and what lay in shared memory is removed. Where Redis keeps what Ray knows, the deployment outlives Ray's server
there."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from tests.cluster.conftest import clustered, deployed_on
from tests.end_to_end.client import check_greedy, mixed
from tests.end_to_end.deployment import BACK_S, Deployment, shared_memory, wait_until
from tests.end_to_end.patient import Patient
from tests.end_to_end.test_restart import DRAIN, parts_of, under_load
from tests.rare import rare
from tests.redis_server import RedisServer, free_ports

HEAD, WORKER = {"CPU": 0}, {"CPU": 4, "decode": 1}
LINES = 40
DONE_S = 120.0
AWAY_S = 70.0  # longer than Ray's nodes wait by default


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


@rare
def test_where_redis_keeps_what_ray_knows_a_deployment_outlives_rays_server(tmp_path: Path) -> None:
    """No stream breaks, though a worker dies meanwhile; it starts again when the server is back."""
    (port,) = free_ports(1)
    redis = RedisServer(tmp_path, "--port", str(port), "--bind", "127.0.0.1")
    kept = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}", "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
    try:
        with (
            clustered(HEAD, WORKER, WORKER, environment=kept) as nodes,
            deployed_on(nodes, "2xcolocated", *DRAIN) as deployment,
        ):
            before, lost = parts_of(nodes.processes()), nodes.pid("decode-1")
            assert lost is not None

            def lose() -> None:
                os.kill(nodes.gcs_server(), signal.SIGKILL)
                os.kill(lost, signal.SIGKILL)
                time.sleep(AWAY_S)  # that it outlives this time is what is tried: nothing ends it sooner
                assert "decode-1 cannot be started: NoAnswer" in deployment.whole_log()
                nodes.restart_gcs_server()
                wait_until(lambda: nodes.pid("decode-1") not in (lost, None), BACK_S, deployment.log)

            under_load(deployment, lose)
            after = parts_of(nodes.processes())
            assert before.items() - after.items() == {(lost, "decode-1")}, "all other parts are the same processes"
            assert sorted(after.values()) == sorted(before.values())
    finally:
        redis.kill()
