"""Tests of `alignedserve explain` on a running deployment."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import httpx

from tests.end_to_end.client import command
from tests.end_to_end.deployment import ANSWER_S, Deployment

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Count from 3 to 9."}], "temperature": 0}


def explain(deployment: Deployment, *flags: str) -> subprocess.CompletedProcess[str]:
    return command("explain", *flags, "--url", deployment.url)


def chat(deployment: Deployment, **fields: object) -> httpx.Response:
    return httpx.post(f"{deployment.url}/v1/chat/completions", json=CHAT | fields, timeout=ANSWER_S)


def test_where_a_request_was_and_what_was_predicted(deployment: Deployment) -> None:
    answer = chat(deployment)
    told = explain(deployment, answer.headers["x-request-id"])
    assert told.returncode == 0, told.stderr
    assert ": real-time, ended after " in told.stdout.splitlines()[0]
    assert "its prompt ran on " in told.stdout
    tokens = answer.json()["usage"]["completion_tokens"]
    decoded = re.findall(r"decoded (\d+) tokens? on (?:prefill|decode)-0 in ", told.stdout)  # it may go on elsewhere
    assert 0 < sum(map(int, decoded)) <= tokens - 1, told.stdout
    assert " predicted" in told.stdout
    assert "did not answer" not in told.stdout


def test_its_stages_take_all_of_its_time(deployment: Deployment) -> None:
    told = json.loads(explain(deployment, chat(deployment).json()["id"], "--json").stdout)
    stages = told["stages"]
    assert [stages[0]["stage"], stages[-1]["stage"]] == ["routing", "decode"]
    assert all(before["ended_at"] == after["began_at"] for before, after in pairwise(stages))
    assert (stages[0]["began_at"], stages[-1]["ended_at"]) == (told["began_at"], told["ended_at"])


def test_as_a_trace(deployment: Deployment, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    told = explain(deployment, chat(deployment).headers["x-request-id"], "--perfetto", str(file))
    assert told.returncode == 0, told.stderr
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"stage", "step"}


def test_why_a_request_was_refused(deployment: Deployment) -> None:
    refused = chat(deployment, slo={"ttft_ms": 0.001, "tbt_ms": 60_000, "strict": True})
    assert refused.status_code == 429
    message = refused.json()["error"]["message"]
    to_ask = message.partition("`")[2].partition("`")[0]
    told = explain(deployment, *to_ask.removeprefix("alignedserve explain ").split())
    assert "refused: its prompt alone takes" in told.stdout.splitlines()[0]


def test_a_request_that_nobody_knows(deployment: Deployment) -> None:
    told = explain(deployment, "req-unknown")
    assert (told.returncode, told.stdout) == (2, "")
    assert "req-unknown" in told.stderr
    assert told.stderr.count("\n") == 1
