"""A limit of memory for one process at a time: a group of this machine's kernel, within that of this process.

It takes a right to make such groups, as root has in most containers. Of the two kinds of groups that Linux has, the
machine may have either."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.chaos.absent import Absent

_MOUNTED = Path("/sys/fs/cgroup")


class MemoryGroup:
    def __init__(self) -> None:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        v1 = [_MOUNTED / "memory" / path.lstrip("/") for _, kinds, path in lines if "memory" in kinds.split(",")]
        v2 = [_MOUNTED / path.lstrip("/") for _, kinds, path in lines if not kinds]
        self._home, limit = (v1[0], "memory.limit_in_bytes") if v1 else (v2[0] if v2 else _MOUNTED, "memory.max")
        self._group = self._home / f"as-chaos-{os.getpid()}"
        try:
            self._group.mkdir()
            self._limit = self._group / limit
            self._limit.touch(exist_ok=True)  # a group without control of memory has no such file, and makes none
        except OSError as error:
            with suppress(OSError):
                self._group.rmdir()
            raise Absent(f"memory is not limited: no group of processes can be made ({error.strerror})") from error

    @contextmanager
    def holding(self, pid: int, most_bytes: int) -> Iterator[None]:
        """During the block end the process where it takes so many bytes more than it has."""
        self._limit.write_text(str(most_bytes))
        (self._group / "cgroup.procs").write_text(str(pid))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                (self._home / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        with suppress(FileNotFoundError):
            self._group.rmdir()
