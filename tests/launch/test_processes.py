"""What the launcher of processes does on a machine that gives it no process or no thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from alignedserve.config.config import load
from alignedserve.launch import processes
from alignedserve.launch.deployment import RunningDeployment
from alignedserve.launch.orders import Reloading
from alignedserve.launch.processes import ProcessHost
from alignedserve.signs import ExitCode
from tests.launch.keepers import specs_of

pytestmark = pytest.mark.usefixtures("own_door")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Let every part be a process that reads its input, and yield these processes."""
    made: list[subprocess.Popen[bytes]] = []
    make = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        made.append(make(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(processes, "module_command", lambda *_: [sys.executable, "-c", "import sys; sys.stdin.read()"])
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
    yield made
    for process in made:
        process.kill()


def ends() -> int:
    config = load({"topology": "1+1"}, {}, None)
    host = ProcessHost()
    return RunningDeployment(config, specs_of(config), Reloading(config, lambda: config), host).run()


def test_without_processes_the_start_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fork(*_: object, **__: object) -> NoReturn:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=fork, PIPE=subprocess.PIPE))
    assert ends() == ExitCode.BROKEN
    assert "cannot be started: OSError: [Errno 12] Cannot allocate memory" in capsys.readouterr().err


def test_without_threads_no_process_is_started_of_which_nobody_would_hear(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[subprocess.Popen[bytes]],
) -> None:
    def no_thread(**_: object) -> SimpleNamespace:
        return SimpleNamespace(start=refused)

    def refused() -> NoReturn:
        raise RuntimeError("can't start new thread")

    without = SimpleNamespace(Thread=no_thread, Lock=threading.Lock, Event=threading.Event)
    monkeypatch.setattr(processes, "threading", without)
    assert ends() == ExitCode.BROKEN
    assert "cannot be started: RuntimeError: can't start new thread" in capsys.readouterr().err
    assert not started
