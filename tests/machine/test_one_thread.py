"""Tests of work that has one core: numpy has one thread there, and nothing else that runs here does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from alignedserve.lab.processes import ONE_THREAD, one_compute_thread

_SIMULATES = """
import os
from pathlib import Path
from alignedserve import simulate
simulate("chat,num_requests=5")
print(len(list(Path("/proc/self/task").iterdir())), os.environ.get("OMP_NUM_THREADS"))
"""


def test_the_environment_is_as_before_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before = dict(os.environ)
    with one_compute_thread():
        assert {name: os.environ[name] for name in ONE_THREAD} == ONE_THREAD
    assert dict(os.environ) == before


def test_a_simulation_has_one_thread_and_leaves_those_of_others_alone() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ONE_THREAD}
    told = subprocess.check_output([sys.executable, "-c", _SIMULATES], env=environment, text=True)
    assert told.splitlines()[-1].split() == ["1", "None"]
