"""The page about schedulers is true: its schedulers, and that of examples/, run in the simulator and the fuzzer."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from alignedserve.cli import main as cli
from alignedserve.core import ServiceClass
from alignedserve.policies.guard import OwnPolicies
from alignedserve.policies.source import PolicySource
from alignedserve.scheduling.policy import Policy
from tests.decode_worker.test_packing import LARGE, Device, make_request

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how" / "scheduler.md").read_text(encoding="utf-8")
CODE = (ROOT / "examples" / "policy.py").read_text(encoding="utf-8")
SCHEDULERS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^    alignedserve (.*)$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands run in a folder with the page's first scheduler, and nothing else."""
    (tmp_path / "longest.py").write_text(SCHEDULERS[0])
    monkeypatch.chdir(tmp_path)


def printed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(shlex.split(command)) == 0
    return capsys.readouterr().out


def test_the_policy_is_short() -> None:
    assert len(CODE.splitlines()) <= 30


def test_the_fuzzer_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    [command] = [command for command in COMMANDS if command.startswith("fuzz")]
    assert "2 seeds, 0 failed" in printed(command.replace("--seeds 20", "--seeds 2 --jobs 1"), capsys)


@pytest.mark.parametrize("text", [CODE, *SCHEDULERS])
def test_its_schedulers_serve_chats_and_documents(text: str) -> None:
    policy = Policy(own=OwnPolicies(PolicySource("policy.py", text)), reuse=False)
    device = Device(policy, LARGE)
    for number in range(9):
        service = ServiceClass.RT if number % 3 == 0 else ServiceClass.BE
        device.ask(make_request(f"r{number}", service, prompt=20 + 10 * number, tokens=10))
        device.step()
    device.run()
    assert [device.said[f"r{number}"] for number in range(9)] == [10] * 9
    assert policy.own.failures.lines() == []
