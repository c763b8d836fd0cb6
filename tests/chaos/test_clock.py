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
# Waits of C and C++ libraries end at a time of the wall clock.
_WAIT = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
semaphore, condition, mutex = (ctypes.create_string_buffer(64) for _ in range(3))
libc.sem_init(semaphore, 0, 0)
libc.pthread_mutex_lock(mutex)
for _ in sys.stdin:
    began, until = time.monotonic(), (ctypes.c_int64 * 2)(int(time.time()) + 2, 0)
    libc.sem_timedwait(semaphore, until)
    libc.pthread_cond_timedwait(condition, mutex, until)
    print(time.monotonic() - began, flush=True)
"""


class Stepping:
    """A process that answers each line with numbers, under a clock that steps."""

    def __init__(self, folder: Path, code: str) -> None:
        try:
            self.clock = WallClock(folder)
        except Absent as why:
            pytest.skip(str(why))
        command, env = [sys.executable, "-c", code], os.environ | dict(self.clock.environment)
        self._process = subprocess.Popen(command, text=True, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return [*map(float, self._process.stdout.readline().split())]

    def end(self) -> None:
        self._process.communicate()


@pytest.mark.parametrize("step", [0, 36_000, -36_000])
def test_every_wall_clock_of_a_running_process_steps_and_its_monotonic_clock_does_not(
    tmp_path: Path, step: int
) -> None:
    process = Stepping(tmp_path, _READ)
    process.ask()
    process.clock.step(step)
    before, since = time.time(), time.monotonic()
    *wall, monotonic = process.ask()
    until = time.monotonic()
    process.end()
    assert since <= monotonic <= until
    assert all(-0.1 <= at - step - before <= until - since + 0.1 for at in wall)


@pytest.mark.parametrize("step", [120, -120])
def test_a_wait_that_begins_after_a_step_takes_as_long_as_it_says(tmp_path: Path, step: int) -> None:
    process = Stepping(tmp_path, _WAIT)
    process.clock.step(step)
    (waited_s,) = process.ask()
    process.end()
    assert 0.9 < waited_s < 60
