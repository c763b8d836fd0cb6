"""Tests of `alignedserve status` on a running deployment."""

from __future__ import annotations

import json
import re
import subprocess

import httpx

from tests.end_to_end.client import command
from tests.end_to_end.deployment import ANSWER_S, BACK_S, Deployment, wait_until


def status(*flags: str) -> subprocess.CompletedProcess[str]:
    return command("status", *flags)


def test_parts_and_what_is_open(deployment: Deployment) -> None:
    # A request of the test before may have ended, and some part may not have reported it yet.
    wait_until(lambda: "rt: 0 open" in status("--url", deployment.url).stdout, BACK_S, deployment.log)
    said = status("--url", deployment.url, "--wait", "10")
    assert said.returncode == 0, said.stderr
    first, promise, node, *rest = said.stdout.splitlines()
    assert first == "ready: demo"
    assert promise.startswith("promise: first token in ")
    assert node.startswith("node local: ")
    assert {"decode-0", "gateway-0", "router"} <= set(node[12:].split(", "))
    assert [line.partition(" open")[0] for line in rest[:2]] == ["be: 0", "rt: 0"]


def test_for_programs(deployment: Deployment) -> None:
    told = json.loads(status("--url", deployment.url, "--json").stdout)
    assert told["state"] == "ready"
    names = [part["name"] for part in told["parts"]]
    assert sorted(names) == sorted(set(names)), "each part once"
    assert {"decode-0", "gateway-0", "jobs-0", "router"} <= set(names), (
        "also those to whom this gateway has nothing to say"
    )


def test_whether_promises_are_kept_is_told(deployment: Deployment) -> None:
    def ask(ttft_ms: int) -> None:
        chat = {"model": "demo", "messages": [{"role": "user", "content": "Count from 3 to 5."}], "temperature": 0}
        promised = {"ttft_ms": ttft_ms, "tbt_ms": 60_000}
        httpx.post(
            f"{deployment.url}/v1/chat/completions", json=chat | {"slo": promised}, timeout=ANSWER_S
        ).raise_for_status()

    before = json.loads(status("--url", deployment.url, "--json").stdout)
    ask(ttft_ms=60_000)
    ask(ttft_ms=1)
    after = json.loads(status("--url", deployment.url, "--json").stdout)
    assert after["attained"].get("rt", 0) - before["attained"].get("rt", 0) == 1
    late = [told["missed"].get("rt", {}).get("ttft", 0) for told in (before, after)]
    assert late[1] - late[0] == 1
    assert re.search(r"% as promised.* % late first token", status("--url", deployment.url).stdout)


def test_nobody_there() -> None:
    said = status("--url", "http://127.0.0.1:9")
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith("alignedserve: nothing answers at http://127.0.0.1:9 (--url names another): ")
    assert said.stderr.count("\n") == 1
