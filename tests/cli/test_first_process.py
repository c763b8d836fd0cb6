"""Tests of a command that is the first process of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.first_process import as_first_process, first_process

ENDED_S = 120.0  # on a busy machine
BEGIN = """
import os, signal, sys, time
from alignedserve.cli.terminal.first_process import leave_first_process
leave_first_process()
assert os.getpid() == 2 and os.getppid() == 1
"""
WAITS = BEGIN + "print('waits', flush=True)\ntime.sleep(600)"
HANDLES = BEGIN + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint('waits', flush=True)\ntime.sleep(600)"
ENDS = BEGIN + "sys.exit(3)"
LEAVES_AN_ORPHAN = """
if not os.fork():
    os._exit(0) if os.fork() else time.sleep(0.1)
    os._exit(0)
os.wait()
while len([name for name in os.listdir("/proc") if name.isdigit()]) > 2:
    time.sleep(0.01)
"""


@contextmanager
def begun(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*as_first_process(), sys.executable, "-c", code], stdout=subprocess.PIPE) as unshare:
        try:
            yield unshare
        finally:
            unshare.kill()  # and with it what it has started


@pytest.mark.parametrize(
    ("code", "status"),
    [(HANDLES, 7), (WAITS, 128 + signal.SIGTERM)],
    ids=["a command that handles it", "a command that does not yet"],
)
def test_a_signal_reaches_the_command(code: str, status: int) -> None:
    with begun(code) as unshare:
        assert unshare.stdout is not None
        assert unshare.stdout.readline() == b"waits\n"
        os.kill(first_process(unshare.pid), signal.SIGTERM)
        assert unshare.wait(ENDED_S) == status


def test_it_ends_as_the_command_does() -> None:
    with begun(ENDS) as unshare:
        assert unshare.wait(ENDED_S) == 3


def test_orphans_are_buried() -> None:
    with begun(BEGIN + LEAVES_AN_ORPHAN) as unshare:
        assert unshare.wait(ENDED_S) == 0, "the command ends once nobody else is there, dead or alive"


def test_the_command_line_does_so() -> None:
    show = "import os, alignedserve.__main__ as entry\nfrom alignedserve.cli import main\n"
    show += "main.main = lambda: print(os.getpid()) or 0\nraise SystemExit(entry.main())"
    with begun(show) as unshare:
        assert unshare.communicate(timeout=ENDED_S)[0] == b"2\n"
