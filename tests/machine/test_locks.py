"""Locks that neighbours cannot hold, and waits that end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from alignedserve import locks
from alignedserve.errors import ArenaError
from alignedserve.gateway.access.adapters import Adapters
from alignedserve.gateway.access.ledger import Ledger
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.locks import LockHeld, NotPrivate, locked, open_private, private_folder
from alignedserve.machine import shared_files, whole_file
from alignedserve.machine.shared_files import HolderLock, check_space, is_held, remove_stale
from alignedserve.machine.whole_file import one_at_a_time
from alignedserve.shell.control import ControlError, private_socket

NOBODY = 65534
HOLDS = """
import fcntl, os, sys
path, kind, uid = sys.argv[1:]
if uid:
    os.setuid(int(uid))
fd = os.open(path, os.O_RDONLY if kind == "flock" else os.O_RDWR)
getattr(fcntl, kind)(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another(path: Path, kind: str = "flock", uid: int | None = None) -> Iterator[None]:
    """Have another process hold the lock, of another user where this one may choose."""
    command = [sys.executable, "-c", HOLDS, str(path), kind, "" if uid is None else str(uid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        yield
        other.communicate()


def as_root() -> None:
    if os.getuid():
        pytest.skip("only root can act as another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """Yield a folder that every user can open, as /dev/shm is."""
    with tempfile.TemporaryDirectory(prefix="neighbours-", dir="/dev/shm") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@pytest.mark.parametrize("uid", [None, NOBODY])
def test_no_lock_on_the_pools_folder_stops_us(shared: Path, uid: int | None) -> None:
    if uid is not None:
        as_root()
    with held_by_another(shared, uid=uid):
        check_space(shared, 1)
        arena = Arena.create(shared / "alignedserve-a", pages=8, payload_bytes=4096, page_size=16, incarnation=1)
        lock = HolderLock(shared, "decode-0")
        assert is_held(shared, "decode-0")
        assert remove_stale(shared, "alignedserve-") == ()
        lock.release()
        arena.unlink()
        arena.close()


def test_a_process_of_ours_that_stops_inside_is_named_and_waited_for_only_so_long(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_files, "lock_folder", lambda: shared)
    monkeypatch.setattr(shared_files, "_ALONE_S", 0.05)
    open_private(path := shared / shared_files.ALONE)
    with held_by_another(path), pytest.raises(ArenaError, match=rf"has kept the lock {path} for .* end it"):
        check_space(shared, 1)
    with held_by_another(path), pytest.raises(LockHeld), locked(path, 0.05, told_s=0.0):
        pass
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [f"waits for the lock {path}, which another process has kept for 0 s"]


def link(path: Path) -> None:
    (path.parent / "target").touch()
    path.symlink_to(path.parent / "target")


def another_users(path: Path) -> None:
    as_root()
    path.touch()
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("trap", [link, os.mkfifo, os.mkdir, another_users])
def test_a_trap_is_no_lock_of_ours(tmp_path: Path, trap: Callable[[Path], None]) -> None:
    trap(path := tmp_path / "lock")
    with pytest.raises(NotPrivate, match=r"lock is not a file of yours.*: remove it"):
        open_private(path)


def test_a_folder_that_is_not_there_is_not_taken_for_another_users(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_private(tmp_path / "nowhere" / "lock")


def test_a_lock_that_others_could_open_is_ours_alone_from_now_on(tmp_path: Path) -> None:
    (path := tmp_path / "lock").touch(mode=0o644)
    os.close(open_private(path))
    assert path.stat().st_mode & 0o777 == 0o600


def linked_folder(path: Path) -> None:
    (path.parent / "target").mkdir(mode=0o700)
    path.symlink_to(path.parent / "target")


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def another_users_folder(path: Path) -> None:
    as_root()
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("trap", [linked_folder, Path.touch, open_to_all, another_users_folder])
def test_a_folder_that_is_not_ours_alone_is_passed_over(tmp_path: Path, trap: Callable[[Path], None]) -> None:
    trap(taken := tmp_path / "taken")
    assert private_folder(taken, tmp_path / "ours") == tmp_path / "ours"
    assert (tmp_path / "ours").stat().st_mode & 0o777 == 0o700
    with pytest.raises(NotPrivate, match="taken is not a folder that only you can use: remove it"):
        private_folder(taken)


def test_sockets_are_in_the_folder_of_the_login_where_the_one_in_tmp_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_to_all(tmp_path / f"alignedserve-{os.getuid()}")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(ControlError, match="set TMPDIR"):
        private_socket("8000")
    (login := tmp_path / "login").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
    assert private_socket("8000") == login / "alignedserve" / "8000.sock"


def test_a_gateway_that_stopped_inside_holds_up_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(path := tmp_path / "limits")
    with held_by_another(path, "lockf"):
        for _ in range(3):
            with ledger.row("ann") as row:
                row.tokens.left += 7
    assert sum("counted without a lock" in record.getMessage() for record in caplog.records) == 1
    with ledger.row("ann") as row:
        assert row.tokens.left == 21
    ledger.close()


def test_adapters_are_found_while_another_gateway_stands_still_inside(tmp_path: Path) -> None:
    adapters = Adapters(path := tmp_path / "adapters")
    with held_by_another(path, "lockf"):
        assert adapters.find("none") is None


def test_a_turn_that_does_not_come_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(whole_file, "TURN_S", 0.05)
    with one_at_a_time(tmp_path) as is_alone:
        assert is_alone
    waits = list[None]()
    with held_by_another(tmp_path / ".lock"), one_at_a_time(tmp_path, lambda: waits.append(None)) as is_alone:
        assert not is_alone
    assert waits, "whoever waits says so meanwhile"
    assert "no turns are taken" in caplog.text
    with held_by_another(tmp_path), one_at_a_time(tmp_path) as is_alone:  # a neighbour, as it was before
        assert is_alone


def test_a_long_wait_is_told_once_and_a_short_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "_LOOK_S", 0.0)
    for told_s, times in ((600.0, 0), (0.0, 1)):
        answers = iter((True, True, True, False))

        def lock(_fd: int, _how: int) -> None:
            if next(answers):  # noqa: B023
                raise BlockingIOError

        caplog.clear()
        locks.take(0, tmp_path / "lock", 600.0, told_s, lock)
        assert len(caplog.records) == times
