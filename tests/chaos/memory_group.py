"""A limit of memory for one process at a time: a group of this machine's kernel, within that of this process.

It takes a right to make such groups, as root has in most containers. Of the two kinds of groups that Linux has, the
machine may have either."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.chaos.absent import Absent

_MOUNTED = Path("/sys/fs/cgroup")
LEAVES_S = 5.0  # a process that was killed leaves its group a moment later


class MemoryGroup:
    def __init__(self) -> None:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        v1 = [_MOUNTED / "memory" / path.lstrip("/") for _, kinds, path in lines if "memory" in kinds.split(",")]
        v2 = [_MOUNTED / path.lstrip("/") for _, kinds, path in lines if not kinds]
        self._home, limit = (v1[0], "memory.limit_in_bytes") if v1 else (v2[0] if v2 else _MOUNTED, "memory.max")
        self._group, self._limit = self._home / f"as-chaos-{os.getpid()}", limit
        try:
            with self._made(1 << 20):
                pass
        except OSError as error:
            raise Absent(f"memory is not limited: no group of processes can be made ({error.strerror})") from error

    @contextmanager
    def holding(self, pid: int, most_bytes: int) -> Iterator[None]:
        """During the block end the process where it takes so many bytes more than it has."""
        with self._made(most_bytes) as processes:
            processes.write_text(str(pid))
            try:
                yield
            finally:
                for each in processes.read_text().split():  # what it has begun meanwhile is there too
                    with suppress(ProcessLookupError):
                        (self._home / "cgroup.procs").write_text(each)

    @contextmanager
    def _made(self, most_bytes: int) -> Iterator[Path]:
        """Make a group with this limit, a new one each time: what a process took stays with its group. Yield the file
        that takes processes."""
        self._group.mkdir()
        try:
            with (self._group / self._limit).open("r+") as file:  # not made: without control of memory it is not there
                file.write(str(most_bytes))
            yield self._group / "cgroup.procs"
        finally:
            until = time.monotonic() + LEAVES_S
            while True:
                try:
                    self._group.rmdir()
                    break
                except OSError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.01)
