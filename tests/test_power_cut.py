"""Tests that the disk of power_cut.py loses what was not synced, and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from tests.power_cut import Disk, Power

_ROWS = """
import os, sqlite3
store = sqlite3.connect("jobs.sqlite", isolation_level=None)
for pragma in ("synchronous = {}", "journal_mode = WAL"):
    store.execute("PRAGMA " + pragma)
store.execute("CREATE TABLE noted (number)")
for number in range(9):
    store.execute("INSERT INTO noted VALUES (?)", (number,))
os._exit(0)
"""


@pytest.fixture
def power(tmp_path: Path) -> Power:
    (disk := tmp_path / "disk").mkdir()
    (disk / "old").write_bytes(b"old")
    return Power(disk, tmp_path / "power")


def run(power: Power, code: str) -> Disk:
    """Run a process in the folder on the disk, and return the disk after its last change."""
    subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=power.folder, env={**os.environ, **power.environment}, check=True
    )
    *_, disk = power.moments()
    return disk


def kept(disk: Disk, into: Path, draw: Random | None = None) -> dict[str, bytes]:
    """Cut the power; return what the disk has: path -> bytes."""
    disk.cut(into, draw)
    return {str(path.relative_to(into)): path.read_bytes() for path in into.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("synchronous", "num_rows"), [("FULL", 9), ("NORMAL", 0), ("OFF", 0)])
def test_a_database_that_does_not_sync_each_commit_loses_some(
    power: Power, tmp_path: Path, synchronous: str, num_rows: int
) -> None:
    run(power, _ROWS.format(synchronous)).cut(tmp_path / "after")
    (tmp_path / "after" / "jobs.sqlite").touch()
    with sqlite3.connect(tmp_path / "after" / "jobs.sqlite") as store:
        found = store.execute("SELECT name FROM sqlite_master").fetchall()
        assert len(store.execute("SELECT * FROM noted").fetchall() if found else []) == num_rows


_SYNC = "; f = os.open({}, os.O_RDONLY); os.fsync(f); os.close(f)"


@pytest.mark.parametrize(
    ("code", "after"),
    [
        ("open('new', 'wb').write(b'x' * 9_000)", {"old": b"old"}),
        ("open('new', 'wb').write(b'x' * 9_000)" + _SYNC.format("'new'"), {"old": b"old"}),
        ("open('new', 'wb').write(b'x' * 9_000)" + _SYNC.format("'.'"), {"old": b"old", "new": b""}),
        ("open('new', 'wb').write(b'xy')" + _SYNC.format("'new'") + _SYNC.format("'.'"), {"old": b"old", "new": b"xy"}),
        ("open('old', 'wb').write(b'new')", {"old": b"old"}),
        ("os.truncate(os.open('old', os.O_RDWR), 1)", {"old": b"old"}),
        ("os.truncate(os.open('old', os.O_RDWR), 1)" + _SYNC.format("'old'"), {"old": b"o"}),
        ("os.pwrite(os.open('old', os.O_RDWR), b'x', 4)" + _SYNC.format("'old'"), {"old": b"old\0x"}),
        ("os.unlink('old')", {"old": b"old"}),
        ("os.unlink('old')" + _SYNC.format("'.'"), {}),
        ("os.rename('old', 'new')", {"old": b"old"}),
        ("os.rename('old', 'new')" + _SYNC.format("'.'"), {"new": b"old"}),
        (
            "os.makedirs('a/b'); open('a/b/new', 'w').close()" + _SYNC.format("'a/b'") + _SYNC.format("'a'"),
            {"old": b"old"},
        ),
    ],
)
def test_what_was_not_synced_is_lost(power: Power, tmp_path: Path, code: str, after: dict[str, bytes]) -> None:
    assert kept(run(power, f"import os; {code}"), tmp_path / "after") == after


def test_a_disk_may_keep_some_of_what_was_not_synced_and_part_of_a_write(power: Power, tmp_path: Path) -> None:
    code = "import os; file = os.open('old', os.O_RDWR); os.pwrite(file, b'1', 0); os.pwrite(file, b'abcd', 4)"
    disk = run(power, code + "; os.rename('old', 'new'); os.mkdir('folder')")
    drawn = [kept(disk, tmp_path / str(seed), Random(seed)) for seed in range(200)]
    assert {data for files in drawn for data in files.values()} >= {b"old", b"1ld", b"1ld\0ab", b"old\0abcd"}
    assert {name for files in drawn for name in files} == {"old", "new"}
    assert all(len(files) == 1 for files in drawn), "a rename is whole"


def test_the_disk_has_noted_all_that_processes_see(power: Power) -> None:
    disk = run(power, _ROWS.format("FULL"))
    seen = {path.name: path.read_bytes() for path in power.folder.iterdir() if path.suffix != ".sqlite-shm"}
    assert {name: disk.read(name) for name in seen} == seen
    assert len(seen) == 3


def test_a_slow_disk_keeps_those_waiting_who_sync(power: Power) -> None:
    power.slow_down(0.2)
    began = time.monotonic()
    run(power, "import os" + 2 * _SYNC.format("'old'"))
    assert time.monotonic() - began > 0.4


def test_a_process_may_be_killed_in_the_middle_of_a_write(power: Power) -> None:
    power.tear(0.5, victim=1)
    run(power, "import os; os.write(os.open('new', os.O_CREAT | os.O_WRONLY), b'another process')")
    power.tear(0.5)
    writes = "; ".join(f"os.write(file, {data!r})" for data in (b"1", b"23456789", b"x"))
    code = f"import os; file = os.open('old', os.O_RDWR); {writes}"
    with pytest.raises(subprocess.CalledProcessError) as killed:
        run(power, code)
    assert killed.value.returncode == -signal.SIGKILL
    assert power.torn_by
    assert (power.folder / "old").read_bytes() == b"12345"
    *_, disk = power.moments()
    assert disk.read("old") == b"12345"
    run(power, code)
    assert (power.folder / "old").read_bytes() == b"123456789x", "one process is killed"


_CHANGES = """
import errno, os
handle = os.open("old", os.O_RDONLY)
ways = {
    "write": lambda: os.write(os.open("old", os.O_WRONLY), b"x"),
    "make": lambda: open("new", "w").close(),
    "folder": lambda: os.mkdir("folder"),
    "rename": lambda: os.rename("old", "older"),
    "remove": lambda: os.unlink("old"),
    "sync": lambda: os.fsync(handle),
}
for name, way in ways.items():
    try:
        way()
        print(name)
    except OSError as error:
        print(name, errno.errorcode[error.errno])
print(*sorted(os.listdir()))
"""


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
def test_a_disk_with_errors_changes_nothing_and_can_be_read(power: Power, error: int) -> None:
    env, command = {**os.environ, **power.environment}, [sys.executable, "-S", "-c", _CHANGES]

    def said() -> list[str]:
        done = subprocess.run(command, cwd=power.folder, env=env, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    with power.failing(error):
        *failed, there = said()
    assert failed == [
        f"{way} {errno.errorcode[error]}" for way in ("write", "make", "folder", "rename", "remove", "sync")
    ]
    assert (there, (power.folder / "old").read_bytes()) == ("old", b"old")
    assert said()[:3] == ["write", "make", "folder"], "it is in order again"
