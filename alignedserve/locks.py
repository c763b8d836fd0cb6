"""Locks between the processes of one user, on files that nobody else can open.

Whoever can open a file may lock it, so the lock of a folder of all users, such as /dev/shm, is anybody's. The kernel
drops a lock when its process ends, but a process may stop inside: each wait has an end, and a line in the log before.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from alignedserve.errors import AlignedServeError

log = logging.getLogger("alignedserve.locks")

TOLD_S = 2.0  # a longer wait is told
_LOOK_S = 0.005

Lock = Callable[[int, int], object]  # fcntl.flock, or fcntl.lockf


class LockHeld(AlignedServeError):
    """Another process keeps a lock for too long."""


class NotPrivate(AlignedServeError):
    """Another user could open this file or folder, or has made it."""


def private_folder(*folders: Path) -> Path:
    """Return the first of these folders that only this user can open, and make it; raise NotPrivate if there is none.

    Another user may have taken a name in a folder of all users, such as /tmp.
    """
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    raise NotPrivate(f"{folders[0]} is not a folder that only you can use: remove it")


def open_private(path: Path) -> int:
    """Open a file that only this user can open, or make it; raise NotPrivate where it is another's, or a link."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR):
            raise
        raise NotPrivate(f"{path} is not a file of yours ({error.strerror}): remove it") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(fd)
        raise NotPrivate(f"{path} is not a file of yours: remove it")
    os.fchmod(fd, 0o600)  # a file that was there may be open to others
    return fd


def take(
    fd: int,
    path: Path,
    within_s: float,
    told_s: float = TOLD_S,
    lock: Lock = fcntl.flock,
    waits: Callable[[], None] = lambda: None,
) -> None:
    """Take the exclusive lock of an open file; raise LockHeld where another process keeps it for longer. A wait of
    `told_s` is told in the log, and `waits` is called again and again meanwhile."""
    began, is_told = time.monotonic(), False
    while True:
        try:
            lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):  # a lock of the one kind, and of the other
            waited_s = time.monotonic() - began
        if waited_s >= within_s:
            raise LockHeld(
                f"another process of yours has kept the lock {path} for {waited_s:.0f} s: end it if it is stuck"
                " (`fuser` names it)"
            )
        if waited_s >= told_s and not is_told:
            log.warning("waits for the lock %s, which another process has kept for %.0f s", path, waited_s)
            is_told = True
        waits()
        time.sleep(_LOOK_S)


@contextmanager
def locked(
    path: Path, within_s: float, told_s: float = TOLD_S, waits: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the lock of this file of ours, which is made if it is missing."""
    fd = open_private(path)
    try:
        take(fd, path, within_s, told_s, waits=waits)
        yield
    finally:
        os.close(fd)
