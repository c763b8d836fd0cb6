"""What this machine, or the container, lets this process have of cores and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Memory:
    """In bytes."""

    total: int
    available: int  # without swapping, by what the kernel says of the machine and of each control group
    limit: int | None  # of the tightest control group


def usable_cores() -> float:
    """What affinity and the container's quota leave of the machine's cores."""
    if hasattr(os, "sched_getaffinity"):
        cores: float = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for group in _groups():
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
    return cores


def memory() -> Memory | None:
    """None on a system that does not tell."""
    machine = _table(_MEMINFO, ":")
    if "MemAvailable" not in machine:
        return None
    available, limits = machine["MemAvailable"] << 10, []
    for group in _groups():
        limit, current = _text(group / "memory.max"), _text(group / "memory.current")
        if limit.isdigit():
            limits.append(int(limit))
            taken = int(current) - _reclaimable(group) if current.isdigit() else 0
            available = min(available, max(0, int(limit) - taken))
    return Memory(machine["MemTotal"] << 10, available, min(limits, default=None))


def _reclaimable(group: Path) -> int:
    """Files that were read count as taken, and make room where it is needed; shared memory does not."""
    held = _table(group / "memory.stat", " ")
    return max(0, held.get("file", 0) - held.get("shmem", 0))


def _groups() -> Iterator[Path]:
    """The process's own control group and those around it, up to the outermost one that it sees."""
    own = next((line[3:] for line in _text(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")), "/")
    group = _CGROUPS / own.strip("/")
    for folder in (group, *group.parents):
        if folder == _CGROUPS or _CGROUPS in folder.parents:
            yield folder


def _table(path: Path, separator: str) -> dict[str, int]:
    """Lines of a name and a whole number, whatever comes after that."""
    rows = (line.partition(separator) for line in _text(path).splitlines())
    numbers = ((name, rest.split()) for name, _, rest in rows)
    return {name: int(rest[0]) for name, rest in numbers if rest and rest[0].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # not this kind of system, or not for this user: then nothing is limited
        return ""
