"""Tests of what running deployments may still take of the machine's memory."""

from __future__ import annotations

import mmap
import os
from contextlib import closing
from pathlib import Path

import pytest

from alignedserve.machine.resources import LivingProcess, MachineMemory
from alignedserve.sizing import memory
from alignedserve.sizing.claims import Claim, claimed, one_plans
from alignedserve.sizing.memory import FreeMemory

MIB = 1 << 20
NAME = "alignedserve-1a2b"


def test_a_claim_counts_until_its_last_process_has_gone(tmp_path: Path) -> None:
    launcher = Claim.make(tmp_path, NAME, 100 * MIB)
    assert claimed(tmp_path) == 100 * MIB
    other = Claim.make(tmp_path, "alignedserve-3c4d", 10 * MIB)
    assert claimed(tmp_path) == 110 * MIB
    worker = Claim.join(tmp_path, NAME, as_worker=False)
    assert worker is not None
    other.close()
    launcher.close()
    assert claimed(tmp_path) == 100 * MIB, "workers go on without their launcher"
    worker.close()
    assert claimed(tmp_path) == 0


def test_what_is_taken_already_does_not_count_twice(tmp_path: Path) -> None:
    """The system counts what a worker's process has written, and what the pool's file takes."""
    with closing(Claim.make(tmp_path, NAME, 1 << 40)), mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE) as written:
        joined = Claim.join(tmp_path, NAME, as_worker=True)
        assert joined is not None
        before = claimed(tmp_path)
        assert before < 1 << 40
        written.write(b"1" * 64 * MIB)
        assert before - claimed(tmp_path) == pytest.approx(64 * MIB, rel=0.2)
        pages = b"1" * 16 * MIB  # now: memory that this process takes counts, too
        before = claimed(tmp_path)
        (tmp_path / f"{NAME}-local").write_bytes(pages)
        assert before - claimed(tmp_path) == pytest.approx(16 * MIB, rel=0.2)
        joined.close()


def test_a_worker_that_has_ended_holds_nothing(tmp_path: Path) -> None:
    with closing(Claim.make(tmp_path, NAME, 1 << 40)):
        (path,) = tmp_path.iterdir()
        me = LivingProcess.of(os.getpid())
        assert me is not None
        path.write_text(f"{1 << 40}\n{me.pid} {me.began - 1}\n", encoding="ascii")
        assert claimed(tmp_path) == 1 << 40


@pytest.mark.parametrize("content", ["", "much\n", "1 2\n", "100\nx y\n"])
def test_a_file_that_is_no_claim_counts_nothing(tmp_path: Path, content: str) -> None:
    with closing(Claim.make(tmp_path, NAME, 1)):
        (path,) = tmp_path.iterdir()
        path.write_text(content, encoding="ascii")
        assert claimed(tmp_path) == 0


def test_nodes_of_a_cluster_have_no_claim(tmp_path: Path) -> None:
    assert Claim.join(tmp_path, NAME, as_worker=True) is None


def test_a_second_deployment_plans_with_what_the_first_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory", lambda: MachineMemory(8000 * MIB, 6000 * MIB, None))
    with closing(Claim.make(tmp_path, NAME, 4000 * MIB)), one_plans():
        assert FreeMemory.here(tmp_path).available == 2000 * MIB
    assert FreeMemory.here(tmp_path).available == 6000 * MIB
