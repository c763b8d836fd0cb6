"""Files in shared memory that several processes map, and the locks that tell which processes live.

Locks are flocks, which the kernel drops when a process dies, however it dies. (A child made by fork shares those of its
parent; processes are spawned here.)

    a mapped file     shared, by each process that maps it: a file without locks is stale
    NAME.lock         exclusive, by the holder NAME: its leases stand while it has the lock
    ALONE             exclusive, for a few system calls: while a process changes names in a directory or tries a lock
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from alignedserve.errors import ArenaError, ArenaTooSmall, LeaseError
from alignedserve.locks import LockHeld, NotPrivate, locked, private_folder

ALONE = "shared-memory.lock"
_ALONE_S = 60.0  # for the lock of some system calls
_ENDING_S = 20.0  # Ray's processes see the end of their node by themselves; on a busy machine 5 s were too few
_LOOK_S = 0.05
_MIB = 1 << 20
_FILLED_AT_ONCE = 1 << 30  # bytes: about half a second


class HolderLock:
    """The lock that a process with leases keeps for its life: `is_held` tells others whether it still lives."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = _lock_path(directory, name)
        with alone(directory):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                raise LeaseError(f"holder {name} lives in another process: {self._path} is locked") from None

    def release(self) -> None:
        with alone(self._path.parent):
            unlink(self._path, self._fd)
            os.close(self._fd)


def is_held(directory: Path, name: str) -> bool:
    """Return whether the process that took the holder's lock still lives."""
    with alone(directory):
        fd = open_file(_lock_path(directory, name))
        if fd is None:
            return False
        held = not _is_lockable(fd)
        os.close(fd)
        return held


def is_stale(path: Path) -> bool:
    """Return whether no process holds this file; what belongs to another user counts as held."""
    with alone(path.parent):
        try:
            fd = open_file(path)
        except PermissionError:
            return False
        if fd is None:
            return True
        stale = _is_lockable(fd)
        os.close(fd)
        return stale


def remove_stale(directory: Path, prefix: str, living: str = "/") -> tuple[Path, ...]:
    """Remove the arenas and holder locks with that prefix that no process holds, and return their paths. A deployment
    that is `living` keeps its own: the next life of a part reads what the last one noted."""
    with alone(directory):
        names = [path.name for path in directory.iterdir() if path.is_file()]
        files = [directory / name for name in names if name.startswith(prefix) and not name.startswith(living)]
        return tuple(path for path in sorted(files) if _remove_if_stale(path))


def remove_ended(directory: Path, prefix: str, ending: str) -> None:
    """Remove what is stale with the first prefix, and wait until nothing is left with the second: processes that hold
    such files are ending now."""
    until = time.monotonic() + _ENDING_S
    while True:
        remove_stale(directory, prefix)
        if time.monotonic() > until or not any(path.name.startswith(ending) for path in directory.iterdir()):
            return
        time.sleep(_LOOK_S)


class Use(NamedTuple):
    """The use of the memory, in words, and the flag that asks for less."""

    what: str
    flag: str


POOL = Use("the KV pool", "--pool-memory-mb")
DEVICE_CACHE = Use("a worker's device cache", "--kv-memory-mb")


def check_space(directory: Path, bytes_needed: int, use: Use = POOL) -> None:
    """Raise ArenaTooSmall where the directory has too little room."""
    with alone(directory):
        there = os.statvfs(directory)
    if bytes_needed > there.f_bavail * there.f_frsize:
        raise _too_small(directory, bytes_needed, use)


def _too_small(directory: Path, needed: int, use: Use) -> ArenaTooSmall:
    there = os.statvfs(directory)
    return ArenaTooSmall(
        f"{directory} has {there.f_bavail * there.f_frsize // _MIB} MiB free and {use.what} needs {-(-needed // _MIB)}"
        f" MiB: lower {use.flag} or, in a container, raise its --shm-size"
    )


def new_file(path: Path) -> tuple[Path, int]:
    """Make a file beside the path, locked before another process could find it stale."""
    with alone(path.parent):
        fd, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return Path(name), fd


def fill(
    directory: Path, fd: int, size: int, use: Use = POOL, advance: Callable[[int], object] = lambda _: None
) -> None:
    """Allocate all of the file's memory now: a page that is missing later would be a SIGBUS for its reader. `advance`
    is told the bytes of each piece."""
    try:
        for begin in range(0, size, _FILLED_AT_ONCE):
            piece = min(_FILLED_AT_ONCE, size - begin)
            os.posix_fallocate(fd, begin, piece)
            advance(piece)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise ArenaError(f"no memory for {use.what} in {directory}: {error.strerror}") from error
        os.ftruncate(fd, 0)  # or the pieces that did fit would not count as free
        raise _too_small(directory, size, use) from error


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Keep our other processes out of the directory meanwhile; raise ArenaError where one keeps us out for long.

    Without this, a process that tries a lock would seem to hold it, and a name could change between a look at a file
    and its removal. One lock serves all directories: it is never held for long.
    """
    if not directory.is_dir():
        raise ArenaError(f"{directory} does not exist: the KV pool needs a directory in shared memory")
    try:
        with locked(lock_folder() / ALONE, _ALONE_S):
            yield
    except (LockHeld, NotPrivate) as error:
        raise ArenaError(str(error)) from None


def lock_folder() -> Path:
    """Return our folder in shared memory, which deployments with different TMPDIRs share; or else one in TMPDIR."""
    name = f"alignedserve-{os.getuid()}"
    return private_folder(Path("/dev/shm", name), Path(tempfile.gettempdir(), name))


def open_file(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None


def _is_lockable(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_stale(path: Path) -> bool:
    try:
        fd = open_file(path)
    except PermissionError:  # the file belongs to another user
        return False
    if fd is None:
        return False
    stale = _is_lockable(fd)
    if stale:
        path.unlink()
    os.close(fd)
    return stale


def unlink(path: Path, fd: int) -> None:
    """Remove the name, if it is still the name of this file."""
    with suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), os.fstat(fd)):
            path.unlink()


def _lock_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.lock"
