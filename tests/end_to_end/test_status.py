"""`alignedserve status` against what serves."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.end_to_end.deployment import Deployment


def status(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "alignedserve", "status", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_parts_and_what_is_open(deployment: Deployment) -> None:
    said = status("--url", deployment.url, "--wait", "10")
    assert said.returncode == 0, said.stderr
    first, node, *rest = said.stdout.splitlines()
    assert first == "ready: demo"
    assert node.startswith("node local: ")
    assert {"decode-0", "gateway-0", "router"} <= set(node[12:].split(", "))
    assert [line.partition(" open")[0] for line in rest[:2]] == ["be: 0", "rt: 0"]


def test_for_programs(deployment: Deployment) -> None:
    told = json.loads(status("--url", deployment.url, "--json").stdout)
    assert told["state"] == "ready"
    names = [part["name"] for part in told["parts"]]
    assert sorted(names) == sorted(set(names)), "each part once"


def test_nobody_there() -> None:
    said = status("--url", "http://127.0.0.1:9")
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith("alignedserve: nothing answers at http://127.0.0.1:9")
    assert said.stderr.count("\n") == 1
