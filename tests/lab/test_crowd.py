"""Tests of the benchmark that has many people ask one server at once, with a scripted server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from alignedserve.lab.benchmarks import crowd
from alignedserve.lab.benchmarks.common import report
from tests.bench.stub import Script, served

BUSY = 429, {"error": {"message": "try again", "type": "rate_limit_error"}}


def run(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *flags: str
) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Return the exit status, the figures by name, and what stands on stderr."""
    monkeypatch.setattr(report, "_missed", [])
    with served(script) as url:
        monkeypatch.setattr(sys, "argv", ["crowd", "--url", url, "--words", "9", "--tokens", "5", *flags])
        with pytest.raises(SystemExit) as ended:
            crowd.main()
    shown, err = capsys.readouterr()
    lines = map(json.loads, shown.splitlines())
    return int(ended.value.code or 0), {line["name"].partition("ours: ")[2]: line for line in lines}, err


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "SETTLES_S", 0.0)


def test_everybody_is_answered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    status, found, _ = run(script, capsys, monkeypatch, "--people", "6")
    assert status == 0
    assert (found["answered"]["value"], found["answered"]["met"], found["told 429"]["value"]) == (6, True, 0)
    assert 0 < found["mean first token"]["value"] <= found["all answered after"]["value"]
    asked = [body for body in script.bodies if body["max_tokens"] == 5]
    assert len({body["messages"][0]["content"] for body in asked}) == 6
    assert not any("slo" in body for body in asked), "nobody asks for a promise"


def test_who_is_told_429_tries_again_twice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(refuse=lambda number, body: BUSY if body["max_tokens"] == 5 and number <= 3 else None)
    status, found, _ = run(script, capsys, monkeypatch, "--people", "2")
    assert (found["answered"]["value"], found["told 429"]["value"]) == (2, 2)
    assert (status, found["told 429"]["met"]) == (1, False), "so few are to be told nothing of the kind"


def test_who_gives_up_is_counted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(refuse=lambda _, body: BUSY if body["max_tokens"] == 5 else None)
    status, found, err = run(script, capsys, monkeypatch, "--people", "1")
    assert (status, found["answered"]["value"], found["told 429"]["value"]) == (1, 0, 3)
    assert "1 not answered: RateLimitError" in err


def test_other_processes_compute_beside_and_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, start = list[subprocess.Popen[bytes]](), subprocess.Popen

    def remembered(command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
        began.append(start(command, **kwargs))
        return began[-1]

    monkeypatch.setattr(crowd.subprocess, "Popen", remembered)
    status, found, _ = run(Script(), capsys, monkeypatch, "--people", "1", "--busy", "2")
    assert (status, found["answered"]["value"]) == (0, 1)
    assert found["answered"]["name"] == "1 at once beside 2 busy processes, ours: answered"
    assert len(began) == 2
    assert {process.returncode for process in began} == {-signal.SIGKILL}
