"""Starts that take long: one that moves is served, however long it takes; one that stands still is ended.

Every tensor of the model is slow to read.
"""

from __future__ import annotations

import re
import tempfile
from uuid import uuid4

from tests.end_to_end.deployment import ANSWER_S, GONE_S, MODEL, deployed, launch, marked, shared_memory, wait_until
from tests.rare import rare

QUIET_S = 3.0  # everything is loaded already; a slow and shared machine may still take its time
LOAD_S = 2 * QUIET_S  # for all tensors

SLOW_READS = """
import time
from pathlib import Path
from alignedserve.engine.weights import tensors
from alignedserve.launch import screen

screen._LINE_S = 1.0  # between two lines of the log
read, num_read = tensors.safe_open, 0


def read_slowly(*args, **options):
    global num_read
    if Path("/proc/self/comm").read_text() == "decode-0\\n":
        num_read += 1
        time.sleep({each_s} if num_read != {hangs_at} else 10_000.0)
    return read(*args, **options)


tensors.safe_open = read_slowly
"""
NEVER = 0
NUM_TENSORS = 40  # at least, in the demo model
QUIET = ("--set", f"launch.quiet_s={QUIET_S}")


@rare  # each start in each run loads for longer than one look of its launcher
def test_a_load_of_several_times_the_limit_is_served() -> None:
    with deployed(*QUIET, plant=SLOW_READS.format(each_s=LOAD_S / NUM_TENSORS, hangs_at=NEVER)) as slow:
        assert slow.ready_s > LOAD_S
        assert slow.is_ready
        assert re.search(r"INFO launcher: starting: decode-0 reads weights: [\d.]+ of [\d.]+ MB", slow.whole_log())


@rare  # tests/launch/test_keeper.py has a part that stands still while it loads
def test_a_load_that_stands_still_is_ended_with_the_name_of_its_part_and_stage() -> None:
    mark, plant = uuid4().hex, SLOW_READS.format(each_s=0.0, hangs_at=NUM_TENSORS // 2)
    with shared_memory() as memory, tempfile.TemporaryFile() as log:
        flags = ("--pool-directory", memory, "--pool-memory-mb", "256", *QUIET)
        process = launch(MODEL, "--port", "0", *flags, mark=mark, stderr=log, plant=plant)
        try:
            code = process.wait(ANSWER_S)
        finally:
            process.kill()
        assert process.stdout is not None
        with process.stdout:
            said = process.stdout.read()
        log.seek(0)
        complained = log.read().decode()
        lines = [line for line in complained.splitlines() if "nothing has moved" in line]
        assert (code, said, len(lines)) == (1, b"", 1), complained
        assert re.fullmatch(
            r"alignedserve: decode-0 reads weights \([\d.]+ of [\d.]+ MB\), and nothing has moved there for \d+ s: "
            r".*launch\.quiet_s",
            lines[0],
        )
        wait_until(lambda: not marked(mark), GONE_S, lambda: f"{marked(mark)} are left")
        assert not list(memory.iterdir()), "files are left in shared memory"
