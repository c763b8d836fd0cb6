"""Tests of a real `ray up cluster.yaml`: over SSH, to two machines on one wire, to a served endpoint, and down
again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import alignedserve
from tests.cluster.machines import Machines, machines, missing
from tests.end_to_end.deployment import wait_until

ROOT = Path(alignedserve.__file__).parents[1]
VENV = Path(sys.prefix)
HEAD, WORKER = ADDRESSES = ("10.77.0.1", "10.77.0.2")
UP_S = 600.0
DOWN_S = 300.0
GONE_S = 240.0  # a node gives its head up after 20 s, and ends
WHY_NOT = missing()

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no machines for `ray up` here: {WHY_NOT}")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path, ADDRESSES) as made:
        yield made


def ours(two: Machines) -> Path:
    """Return cluster.yaml changed as its comments say; what it installs is already here."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    config["provider"] |= {"head_ip": HEAD, "worker_ips": [WORKER]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(two.key)}
    secrets = two.folder / "secrets"
    secrets.mkdir(mode=0o700)
    (secrets / "ray-token").write_text("ab" * 32)
    config["file_mounts"] = {"~/alignedserve/deploy": str(ROOT / "deploy"), "~/alignedserve/secrets": str(secrets)}
    *_, for_logins = config["setup_commands"]
    installed = f"mkdir -p ~/alignedserve && ln -sfn {VENV} ~/alignedserve/venv"
    config["setup_commands"] = [installed, for_logins]
    path = two.folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run(two: Machines, *command: str | Path, timeout_s: float = DOWN_S) -> str:
    done = two.run(*command, timeout_s=timeout_s)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{two.log(HEAD)}"
    return done.stdout


def test_up_ends_with_a_served_endpoint_and_down_leaves_nothing(two: Machines) -> None:
    ray, cluster = VENV / "bin" / "ray", ours(two)
    run(two, ray, "up", "-y", cluster, timeout_s=UP_S)

    chat = {"model": "demo", "messages": [{"role": "user", "content": "Count from 3 to 12."}], "temperature": 0}
    url = "http://127.0.0.1:8000/v1/chat/completions"
    asked = run(two, "curl", "-sS", url, "-H", "content-type: application/json", "-d", json.dumps(chat))
    assert json.loads(asked)["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"

    told = run(two, ray, "exec", cluster, "alignedserve status --json")
    parts = json.loads(next(line for line in told.splitlines() if line.startswith('{"state"')))["parts"]
    where = {part["name"]: part["address"].split("/")[2].split(":")[0] for part in parts}
    assert {where[name] for name in ("pool-0", "prefill-0", "decode-0")} == {WORKER}
    assert {where[name] for name in ("router", "gateway-0")} == {HEAD}

    lines, results = two.folder / "lines.jsonl", two.folder / "results.jsonl"
    each = {"method": "POST", "url": "/v1/chat/completions"}
    lines.write_text("".join(json.dumps(each | {"custom_id": f"line-{n}", "body": chat}) + "\n" for n in range(3)))
    run(two, VENV / "bin" / "alignedserve", "batch", "submit", lines, "--wait", "--out", results)
    answers = [json.loads(line) for line in results.read_text().splitlines()]
    said = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers}
    assert said == {f"line-{n}": "3, 4, 5, 6, 7, 8, 9, 10, 11, 12" for n in range(3)}

    run(two, ray, "exec", cluster, "alignedserve stop")
    wait_until(lambda: not any("alignedserve serve" in line for line in two.processes(0)), GONE_S)

    run(two, ray, "down", "-y", cluster)
    wait_until(lambda: not any(map(two.processes, range(2))), GONE_S, lambda: str([*map(two.processes, range(2))]))
