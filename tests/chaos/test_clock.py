"""Tests that a deployment's wall clock steps, and its monotonic clock does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.absent import Absent
from tests.chaos.clock import WallClock

_READ = """
import datetime, sys, time
for _ in sys.stdin:
    print(time.time(), time.time_ns() / 1e9, datetime.datetime.now().timestamp(), time.monotonic(), flush=True)
"""


def test_every_wall_clock_of_a_running_process_steps_and_its_monotonic_clock_does_not(tmp_path: Path) -> None:
    try:
        clock = WallClock(tmp_path)
    except Absent as why:
        pytest.skip(str(why))
    command, env = [sys.executable, "-c", _READ], os.environ | dict(clock.environment)
    with subprocess.Popen(command, text=True, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for step in (0, 36_000, -72_000):
            clock.step(step)
            before, since = time.time(), time.monotonic()
            process.stdin.write("\n")
            process.stdin.flush()
            *wall, monotonic = map(float, process.stdout.readline().split())
            until = time.monotonic()
            assert since <= monotonic <= until
            assert all(-0.1 <= at - clock.offset_s - before <= until - since + 0.1 for at in wall)
        process.stdin.close()
