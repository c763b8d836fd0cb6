"""What running deployments may still take of this machine's memory.

A device cache on a CPU takes memory only once it is written, so beside an idle deployment more seems to be free than
will be. Therefore each deployment has a file in shared memory:

    25769803776       bytes that its workers and its pool may come to
    4711 183920       a worker's process: its pid, and when it began
    4712 183924

The launcher makes it and the workers add themselves; all keep it locked (machine/shared_files.py), so the file of
a deployment that has ended is stale. What these processes hold already, and what the pool's file takes, the system
counts by itself.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from alignedserve.errors import ArenaError
from alignedserve.locks import LockHeld, NotPrivate, locked
from alignedserve.machine.resources import LivingProcess
from alignedserve.machine.shared_files import alone, is_stale, lock_folder, new_file

_NAME = "claim"
_PLANS_S = 60.0  # for the lock of a plan, which takes less than a second
_UNIT_OF_BLOCKS = 512  # bytes, whatever the file system's own are


class Claim:
    """The file of a deployment, which counts until this process closes it and its workers have ended."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def make(cls, directory: Path, deployment: str, num_bytes: int) -> Claim:
        _, fd = new_file(directory / f"{deployment}-{_NAME}")
        os.write(fd, b"%d\n" % num_bytes)
        return cls(fd)

    @classmethod
    def join(cls, directory: Path, deployment: str, *, as_worker: bool) -> Claim | None:
        """Keep the deployment's claim for this process, too; None where it has none, as on the nodes of a cluster."""
        with alone(directory):
            path = next(directory.glob(f"{deployment}-{_NAME}.*"), None)
            if path is None:
                return None
            fd = os.open(path, os.O_RDWR | os.O_APPEND)
            fcntl.flock(fd, fcntl.LOCK_SH)
        if as_worker and (me := LivingProcess.of(os.getpid())) is not None:
            os.write(fd, b"%d %d\n" % (me.pid, me.began))
        return cls(fd)

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def one_plans() -> Iterator[None]:
    """Keep other launchers of this user from planning meanwhile: each counts what those before have claimed."""
    try:
        with locked(lock_folder() / "sizes.lock", _PLANS_S):
            yield
    except (LockHeld, NotPrivate) as error:
        raise ArenaError(str(error)) from None


def claimed(directory: Path) -> int:
    """Return the bytes that running deployments may take beside those that they have taken."""
    return sum(_outstanding(path) for path in directory.glob(f"*-{_NAME}.*") if not is_stale(path))


def _outstanding(claim: Path) -> int:
    try:
        first, *processes = claim.read_text(encoding="ascii").splitlines()
        most, told = int(first), [LivingProcess(*map(int, line.split())) for line in processes]
    except (OSError, ValueError, TypeError):  # another user's, or one that ends now
        return 0
    deployment = claim.name.rpartition(f"-{_NAME}.")[0]
    in_files = sum(map(_bytes_in, (path for path in claim.parent.glob(f"{deployment}-*") if path != claim)))
    return max(0, most - in_files - sum(map(_private_bytes, told)))


def _bytes_in(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_blocks * _UNIT_OF_BLOCKS
    return 0


def _private_bytes(process: LivingProcess) -> int:
    """Return the memory that this process alone holds: 0 once it has ended."""
    with suppress(OSError):
        if process.lives:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8", errors="replace")
            held = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
            return sum(int(kib) << 10 for kib in held)
    return 0
