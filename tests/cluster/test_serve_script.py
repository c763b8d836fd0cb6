"""Tests of deploy/serve.sh with fakes in place of Ray and AlignedServe: what it starts again, and what it says."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.end_to_end.deployment import wait_until

ROOT = Path(__file__).resolve().parents[2]
SERVES = 'echo $$ >> starts; echo "serving demo on http://127.0.0.1:8000"; echo "try: curl"; exec sleep 600'
SOON_S = 120.0


class Head:
    """The home directory of a machine, as `ray up` leaves it."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "alignedserve"
        programs = self.folder / "venv" / "bin"
        programs.mkdir(parents=True)
        (self.folder / "deploy").symlink_to(ROOT / "deploy")
        self._programs, self._home = programs, home
        self.program("ray", "exit 0")

    def program(self, name: str, what: str) -> None:
        path = self._programs / name
        path.write_text(f"#!/bin/sh\n{what}\n")
        path.chmod(0o755)

    def serve(self) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"HOME": str(self._home)}
        command = ["sh", str(ROOT / "deploy" / "serve.sh"), "serve.yaml"]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=SOON_S, check=False)

    @property
    def starts(self) -> list[int]:
        """Return the process numbers of all starts."""
        return [int(line) for line in (self.folder / "starts").read_text().splitlines()]

    def group(self) -> int:
        return int((self.folder / "serve.pid").read_text())

    def log(self) -> str:
        return (self.folder / "serve.log").read_text()


def lives(group: int) -> bool:
    """Return whether a process of the group runs: one that has ended may still wait to be buried."""
    stats = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it was buried meanwhile
            stats.append(stat.read_text().rpartition(")")[2].split()[:3])
    return any(state not in "ZX" and int(of) == group for state, _, of in stats)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    made = Head(tmp_path)
    yield made
    with suppress(OSError):
        os.killpg(made.group(), signal.SIGKILL)


def test_it_returns_once_it_serves_and_starts_again_what_ends(head: Head) -> None:
    head.program("alignedserve", SERVES)
    done = head.serve()
    assert (done.returncode, done.stdout) == (0, "serving demo on http://127.0.0.1:8000\ntry: curl\n"), done.stderr
    os.kill(head.starts[0], signal.SIGKILL)
    wait_until(lambda: len(head.starts) == 2, SOON_S, head.log)


def test_what_the_launcher_says_is_shown_and_ends_with_the_table(head: Head) -> None:
    lines = ["fault: 10.0.0.2: driver 570.1 runs CUDA 12: install driver 580", "node 10.0.0.1: router; 4 x H100"]
    told = "; ".join(f'echo "alignedserve: {line}" >&2' for line in lines)
    head.program("alignedserve", f"echo '2026-12-01 INFO a line of the log' >&2; {told}; {SERVES}")
    assert head.serve().stdout.splitlines()[:3] == [*lines, "serving demo on http://127.0.0.1:8000"]


def test_another_ray_up_takes_the_place_of_the_ray_up_before(head: Head) -> None:
    head.program("alignedserve", SERVES)
    assert head.serve().returncode == 0
    first = head.group()
    assert head.serve().returncode == 0
    assert head.group() != first
    assert not lives(first)


def test_it_stays_down_once_it_was_told_to_stop(head: Head) -> None:
    head.program("alignedserve", 'echo "serving demo on somewhere"; exit 0')
    assert head.serve().returncode == 0
    wait_until(lambda: not (head.folder / "serve.pid").exists(), SOON_S, head.log)


def test_a_setting_that_is_wrong_is_said_and_ends_it(head: Head) -> None:
    head.program("alignedserve", 'echo $$ >> starts; echo "alignedserve: topology must be" >&2; exit 2')
    done = head.serve()
    assert (done.returncode, done.stderr) == (1, "alignedserve: topology must be\n")
    assert len(head.starts) == 1
