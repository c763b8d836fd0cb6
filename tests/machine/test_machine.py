"""Tests of what the kernel's files say of cores and memory, in a container or out of it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from alignedserve.machine import resources as machine

MIB = 1 << 20
UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the outermost control group; the process is in its a/b. The machine has 800 of 1,000 MB left."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {1000 << 10} kB\nMemAvailable: {800 << 10} kB\nHugePages_Total: 0\n")
    read = machine._text
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_MEMINFO", meminfo)
    own = Path("/proc/self/cgroup")
    monkeypatch.setattr(
        machine, "_text", lambda path: "4:memory:/c\n3:cpuacct,cpu:/d\n0::/a/b" if path == own else read(path)
    )
    return tmp_path


def limit(group: Path, most: int | str, taken: int, **held: int) -> None:
    (group / "memory.max").write_text(f"{most * MIB if isinstance(most, int) else most}\n")
    (group / "memory.current").write_text(f"{taken * MIB}\n")
    (group / "memory.stat").write_text("".join(f"{name} {size * MIB}\n" for name, size in held.items()))


def test_quotas_limit_the_cores_from_the_own_group_to_the_outermost(groups: Path) -> None:
    assert machine.usable_cores() == len(os.sched_getaffinity(0))
    (groups / "cpu.max").write_text("50000 100000\n")
    (groups / "a" / "b" / "cpu.max").write_text("200000 100000\n")
    assert machine.usable_cores() == 0.5
    (groups / "a" / "cpu.max").write_text("25000 100000\n")
    assert machine.usable_cores() == 0.25
    for name in ("cpu.max", "a/cpu.max", "a/b/cpu.max"):
        (groups / name).write_text("max 100000\n")
    assert machine.usable_cores() == len(os.sched_getaffinity(0))


def test_memory_of_a_machine_without_limits(groups: Path) -> None:
    assert machine.memory() == machine.MachineMemory(1000 * MIB, 800 * MIB, None)
    limit(groups / "a", "max", 700)
    assert machine.memory() == machine.MachineMemory(1000 * MIB, 800 * MIB, None)


def test_the_tightest_group_says_what_is_available(groups: Path) -> None:
    limit(groups / "a", 500, 450)
    assert machine.memory() == machine.MachineMemory(1000 * MIB, 50 * MIB, 500 * MIB)
    limit(groups / "a" / "b", 400, 100)
    assert machine.memory() == machine.MachineMemory(1000 * MIB, 50 * MIB, 400 * MIB)


def test_files_that_were_read_make_room_shared_memory_does_not(groups: Path) -> None:
    limit(groups / "a", 500, 450, anon=100, file=300, shmem=120)
    assert machine.memory() == machine.MachineMemory(1000 * MIB, 230 * MIB, 500 * MIB)


def test_control_groups_of_version_1(groups: Path) -> None:
    """Each controller has a tree of its own there, and without a limit a huge number. In a container the process's own
    group may not be seen, but the tree begins at the container's."""
    shared, own = groups / "memory", groups / "memory" / "c"
    own.mkdir(parents=True)
    (groups / "cpu").mkdir()
    for group in (shared, own):
        (group / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert machine.memory() == machine.MachineMemory(1000 * MIB, 800 * MIB, None)
    (shared / "memory.limit_in_bytes").write_text(f"{600 * MIB}\n")
    (shared / "memory.usage_in_bytes").write_text(f"{500 * MIB}\n")
    (shared / "memory.stat").write_text(f"cache 0\ntotal_cache {200 * MIB}\ntotal_shmem {50 * MIB}\n")
    assert machine.memory() == machine.MachineMemory(1000 * MIB, 250 * MIB, 600 * MIB)
    for quota, cores in ((-1, len(os.sched_getaffinity(0))), (50_000, 0.5)):
        (groups / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (groups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        assert machine.usable_cores() == cores


def test_a_system_that_does_not_tell(groups: Path) -> None:
    (groups / "meminfo").unlink()
    assert machine.memory() is None


@pytest.mark.parametrize(
    ("limits", "allowed", "set_to"),
    [
        ((256, 4096), 1000, (1000, 4096)),
        ((256, 512), 512, (512, 512)),
        ((2048, 4096), 2048, None),
        ((48, 48), 48, None),
        ((256, UNLIMITED), 1000, (1000, UNLIMITED)),
        ((UNLIMITED, UNLIMITED), 1000, None),
    ],
)
def test_open_files_are_allowed_as_far_as_the_system_lets(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], allowed: int, set_to: tuple[int, int] | None
) -> None:
    became: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: became.append(new))
    assert machine.allow_open_files(1000) == allowed
    assert became == ([] if set_to is None else [set_to])
