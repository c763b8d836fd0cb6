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


def pipe_that_nobody_reads() -> int:
    """As of a `less` that was stopped."""
    reads, writes = os.pipe()
    os.dup(reads)
    return writes


OUTPUTS = (full_disk, pipe_without_reader, full_pipe_that_does_not_wait, pipe_that_nobody_reads)


@pytest.mark.parametrize("output", OUTPUTS)
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


SAYS_MORE_THAN_FITS = """
import sys

from alignedserve.shell.logs import never_fail_to_print

never_fail_to_print()
for _ in range(30):
    print("said" * 10_000)
print("waits", file=sys.stderr)
sys.stdin.readline()
print("said again")
print("and again")
"""


def test_a_reader_that_stood_still_is_told_how_much_it_missed() -> None:
    command = [sys.executable, "-c", SAYS_MORE_THAN_FITS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "waits\n"
        os.set_blocking(process.stdout.fileno(), False)
        first = process.stdout.read()
        os.set_blocking(process.stdout.fileno(), True)
        rest, _ = process.communicate("\n")
    lost = 30 * len("said" * 10_000 + "\n") - len(first)
    assert lost > 0
    assert rest == f"\nalignedserve: {lost:,} bytes of output were lost here\nsaid again\nand again\n"
