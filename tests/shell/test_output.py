"""What a process says never ends it, whatever its output is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SAYS_MUCH = """
import logging, sys, threading, traceback

from alignedserve.shell.logs import never_fail_to_print

never_fail_to_print()
logging.basicConfig()
for _ in range(3):
    print("said" * 10_000)
    print("complained" * 10_000, file=sys.stderr)
    logging.warning("logged")
try:
    raise ValueError("shown")
except ValueError:
    traceback.print_exc()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
print("last", end="")
print("last", end="", file=sys.stderr)
sys.exit(7)
"""


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def pipe_without_reader() -> int:
    reads, writes = os.pipe()
    os.close(reads)
    return writes


def full_pipe_that_does_not_wait() -> int:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    os.dup(reads)  # it stays open, and nobody reads
    return writes


@pytest.mark.parametrize("output", [full_disk, pipe_without_reader, full_pipe_that_does_not_wait])
def test_a_process_lives_on_whatever_its_output_is(output: Callable[[], int]) -> None:
    file = output()
    done = subprocess.run([sys.executable, "-c", SAYS_MUCH], stdout=file, stderr=file, check=False)
    os.close(file)
    assert done.returncode == 7


def test_an_output_that_is_lost_is_not_complained_of_on_the_other() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAYS_MUCH], stdout=full_disk(), stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 7
    assert done.stderr.count("complained") == 30_000
    assert "No space left" not in done.stderr
    assert done.stderr.endswith("last")


def test_what_can_be_written_is_written(tmp_path: Path) -> None:
    said, complained = tmp_path / "said", tmp_path / "complained"
    with said.open("wb") as stdout, complained.open("wb") as stderr:
        done = subprocess.run([sys.executable, "-c", SAYS_MUCH], stdout=stdout, stderr=stderr, check=False)
    assert done.returncode == 7
    assert said.read_text() == f"{'said' * 10_000}\n" * 3 + "last"
    assert [complained.read_text().count(word) for word in ("WARNING:root:logged", "shown", "ZeroDivision")] == [
        3,
        1,
        1,
    ]


def test_a_process_without_any_output_lives_on() -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, SAYS_MUCH]
    assert subprocess.run(command, check=False).returncode == 7
