"""Starts that take long: one that moves is served, however long it takes; one that stands still is ended.

A folder before all others on the path of Python makes every tensor of the model slow to read.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from tests.conftest import SOAK
from tests.end_to_end.deployment import (
    ANSWER_S,
    GONE_S,
    LAUNCHERS,
    MODEL,
    Deployment,
    marked,
    shared_memory,
    spawn,
    wait_until,
)

QUIET_S = 6.0  # a slow and shared machine may take seconds for a library of torch
RAY_QUIET_S = 60.0  # Ray takes its time for the first actors
LOAD_S = 2.5 * QUIET_S  # for all tensors

SLOW_READS = """
import sys
import time

import safetensors

read, num_read = safetensors.safe_open, 0


def read_slowly(*args, **options):
    global num_read
    if "alignedserve.engine.engine" in sys.modules:
        num_read += 1
        time.sleep({each_s} if num_read != {hangs_at} else 10_000.0)
    return read(*args, **options)


safetensors.safe_open = read_slowly
"""
NEVER = 0
NUM_TENSORS = 40  # at least, in the demo model


def reading_slowly(folder: Path, each_s: float, hangs_at: int = NEVER, quiet_s: float = QUIET_S) -> dict[str, str]:
    """Return the environment of a deployment whose workers wait before each tensor, and for ever before one of them."""
    (folder / "sitecustomize.py").write_text(SLOW_READS.format(each_s=each_s, hangs_at=hangs_at))
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "ALIGNEDSERVE_LAUNCH_QUIET_S": str(quiet_s)}


def test_a_load_of_several_times_the_limit_is_served(tmp_path: Path) -> None:
    environment = reading_slowly(tmp_path, LOAD_S / NUM_TENSORS)
    with shared_memory() as memory:
        slow = Deployment(memory=memory, environment=environment)
        try:
            assert slow.ready_s > LOAD_S
            assert slow.is_ready
            assert re.search(r"INFO launcher: starting: decode-0 reads weights: [\d.]+ of [\d.]+ MB", slow.whole_log())
            assert slow.stop() == 0
        finally:
            slow.kill()
            slow.forget()


@pytest.mark.parametrize("launcher", LAUNCHERS if SOAK else LAUNCHERS[:1])
def test_a_load_that_stands_still_is_ended_with_the_name_of_its_part_and_stage(tmp_path: Path, launcher: str) -> None:
    quiet_s = RAY_QUIET_S if launcher == "ray" else QUIET_S
    mark, environment = uuid4().hex, reading_slowly(tmp_path, 0.0, NUM_TENSORS // 2, quiet_s)
    with shared_memory() as memory:
        flags = ("--pool-directory", memory, "--pool-memory-mb", "256", "--launcher", launcher)
        process = spawn(MODEL, "--port", "0", *flags, mark=mark, environment=environment)
        try:
            said, complained = process.communicate(timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        lines = [line for line in complained.decode().splitlines() if " INFO " not in line]
        assert (process.returncode, said, len(lines)) == (1, b"", 1), complained.decode()
        assert re.fullmatch(
            r"alignedserve: decode-0 reads weights \([\d.]+ of [\d.]+ MB\), and nothing has moved there for \d+ s: "
            r".*launch\.quiet_s",
            lines[0],
        )
        wait_until(lambda: not marked(mark), GONE_S, lambda: f"{marked(mark)} are left")
        assert not list(memory.iterdir()), "files are left in shared memory"
