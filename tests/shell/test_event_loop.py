"""Tests that a process whose event loop stands still ends and says where, and that no other one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

STILL_S = 0.6
PROGRAM = """
import asyncio, logging, os, sys, threading, time
from alignedserve.shell.event_loop import run_loop
from alignedserve.shell.loop_watch import LoopWatch
logging.basicConfig(format="%(message)s")

async def main():
    {main}
    print("ended", flush=True)

run_loop(main(), LoopWatch({still_s}))
"""


def begin(main: str) -> subprocess.Popen[str]:
    program = PROGRAM.format(main="\n    ".join(main.splitlines()), still_s=STILL_S)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, text=True)


def test_a_process_whose_loop_stands_still_ends_and_says_where() -> None:
    with begin("def stuck():\n    threading.Event().wait()\nstuck()") as process:
        said, written = process.communicate(timeout=120)
    assert (process.returncode, said) == (1, "")
    line, *traces = written.splitlines()
    assert "the event loop has stood still" in line
    assert "threading.py" in line
    assert any("in stuck" in trace for trace in traces), written


def test_a_loop_that_is_busy_in_python_is_ended_too() -> None:
    with begin("while True:\n    pass") as process:
        process.communicate(timeout=120)
    assert process.returncode == 1


def test_a_loop_that_turns_goes_on_however_often_it_stands_for_a_moment() -> None:
    with begin(f"for _ in range(4):\n    time.sleep({STILL_S / 2})\n    await asyncio.sleep({STILL_S / 6})") as process:
        assert process.communicate(timeout=120) == ("ended\n", "")
    assert process.returncode == 0


def test_a_process_that_was_suspended_has_not_stood_still() -> None:
    with begin("print(flush=True)\nfor _ in range(20):\n    await asyncio.sleep(0.01)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2 * STILL_S)
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate(timeout=120) == ("ended\n", "")
