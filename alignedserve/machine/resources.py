"""The cores, the memory and the open files that this process may use of its machine or container."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FEW_CORES = 2
_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class MachineMemory:
    """The memory of the machine or container, in bytes."""

    total: int
    available: int  # without swapping: the least that the kernel reports of the machine and of each control group
    limit: int | None  # of the tightest control group


def usable_cores() -> float:
    """Return how many of the machine's cores affinity and the container's quota leave."""
    if hasattr(os, "sched_getaffinity"):
        cores: float = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for group in _groups("cpu"):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not quota:  # version 1 of control groups
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
    return cores


def threads_of_each(workers: int) -> int:
    """Return the compute threads of each worker: its share of the cores, less a core for all else.

    With two cores none is left out: it would be half of them, and the other processes use a tenth of a core.
    """
    cores = int(usable_cores())
    return max(1, (cores if cores <= _FEW_CORES else cores - 1) // workers)


def processor_name() -> str:
    """Return the processor's name, such as AMD EPYC 9R14."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory() -> MachineMemory | None:
    """Return the memory, or None on a system that does not report it."""
    machine = _table(_MEMINFO, ":")
    if "MemAvailable" not in machine:
        return None
    available, limits = machine["MemAvailable"] << 10, []
    for group in _groups("memory"):
        limit = _text(group / "memory.max") or _text(group / "memory.limit_in_bytes")  # version 2 or 1
        current = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
        if limit.isdigit() and int(limit) < machine["MemTotal"] << 10:
            limits.append(int(limit))
            taken = int(current) - _reclaimable(group) if current.isdigit() else 0
            available = min(available, max(0, int(limit) - taken))
    return MachineMemory(machine["MemTotal"] << 10, available, min(limits, default=None))


def allow_open_files(wanted: int) -> int:
    """Raise this process's limit of open files to `wanted`, or to what the system allows; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def _reclaimable(group: Path) -> int:
    """Return the bytes of cached files: they count as taken but make room on demand, which shared memory does not."""
    held = _table(group / "memory.stat", " ")
    files, shared = held.get("file", held.get("total_cache", 0)), held.get("shmem", held.get("total_shmem", 0))
    return max(0, files - shared)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the process's control group and the groups around it, up to the outermost group that it sees.

    In version 2 all controllers share one tree, which has no name; in version 1 each has a tree of its own.
    """
    for line in _text(Path("/proc/self/cgroup")).splitlines() or ["0::/"]:
        _, names, own = line.split(":", 2)
        root = _CGROUPS / controller if names else _CGROUPS
        group = root / own.strip("/")
        if not names or controller in names.split(","):
            yield from (folder for folder in (group, *group.parents) if folder == root or root in folder.parents)


def _table(path: Path, separator: str) -> dict[str, int]:
    """Return the numbers of a file whose lines hold a name, a whole number and perhaps more."""
    rows = (line.partition(separator) for line in _text(path).splitlines())
    numbers = ((name, rest.split()) for name, _, rest in rows)
    return {name: int(rest[0]) for name, rest in numbers if rest and rest[0].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # another system, or not readable for this user: nothing is limited
        return ""


@dataclass(frozen=True)
class LivingProcess:
    """A process, for as long as it lives: another one may have its pid later."""

    pid: int
    began: int  # by the kernel's clock

    @classmethod
    def of(cls, pid: int) -> LivingProcess | None:
        """Return the process with this pid; None if it has ended."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def lives(self) -> bool:
        return LivingProcess.of(self.pid) == self
