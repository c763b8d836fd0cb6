"""Deployments whose log is lost, whose neighbours lock what they can, and whose shared memory is small."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from tests.end_to_end.client import all_tokens, check_greedy, mixed
from tests.end_to_end.deployment import (
    BACK_S,
    GONE_S,
    MODEL,
    STOP_S,
    deployed,
    launch,
    marked,
    part_of,
    shared_memory,
    wait_until,
)
from tests.planted import LOST_LOGS, lost_log
from tests.rare import rare
from tests.small_disk import small_disk


def check_answers(url: str) -> None:
    wanted = mixed(3, seed=8, outputs=(1, 60))
    check_greedy(wanted, asyncio.run(all_tokens(url, wanted)))


def is_ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    return False


@rare  # tests/shell/test_output.py has a process with each of them
@pytest.mark.parametrize("log", LOST_LOGS)
def test_a_log_that_cannot_be_written_costs_nothing(log: str) -> None:
    """As in `serve 2>&1 | head`: nobody reads the log any more, parts die, and they come back."""
    mark = uuid4().hex

    def pid(part: str) -> int | None:
        return next((pid for pid, command in marked(mark).items() if part_of(command) == part), None)

    with shared_memory() as memory, lost_log(log) as stderr:
        flags = ("--port", "0", "--pool-directory", memory, "--pool-memory-mb", "64", "--profile-s", "0")
        process = launch(MODEL, *flags, mark=mark, stderr=stderr)
        try:
            assert process.stdout is not None
            greeting = process.stdout.readline().decode() + process.stdout.readline().decode()
            url = re.findall(r"http://[\d.]+:\d+", greeting)[0]
            process.stdout.close()
            for part in ("jobs-0", "decode-0", "gateway-0"):
                before = pid(part)
                assert before is not None
                os.kill(before, signal.SIGKILL)
                wait_until(lambda part=part, before=before: pid(part) not in (None, before), BACK_S)
            wait_until(lambda: is_ready(url), BACK_S)
            check_answers(url)
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_S) == 0
            wait_until(lambda: not marked(mark), GONE_S, lambda: f"{marked(mark)} are left")
        finally:
            for left in marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
            process.wait()


@contextmanager
def flocked(*folders: Path) -> Iterator[None]:
    """Hold a lock on each folder, as any user may who can open it."""
    files = [os.open(folder, os.O_RDONLY) for folder in folders]
    try:
        for file in files:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        for file in files:
            os.close(file)


@rare  # tests/machine/test_locks.py has locks of neighbours, tests/kvpool pools of a few pages
def test_a_small_shared_memory_serves_and_no_lock_of_a_neighbour_stops_a_start_a_restart_or_an_end(
    tmp_path: Path,
) -> None:
    with (
        small_disk(tmp_path / "shm", "4m") as disk,
        flocked(disk.folder, Path("/dev/shm")),
        deployed("--pool-memory-mb", "1", memory=disk.folder) as deployment,
    ):
        for part in ("decode-0", "pool-0", "router", "gateway-0"):
            deployment.wound(part)
        wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
        check_answers(deployment.url)
        assert "keeps few prefixes; give" in deployment.whole_log(), "what is lost is said"
        assert "SIGBUS" not in deployment.whole_log()
