"""What the kernel says of this process (its processor time, its memory, its open files), and its Python; and how busy
its machine is: its processors, its memory and its GPUs, whoever uses them."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from pathlib import Path

from alignedserve.fallbacks import fallbacks
from alignedserve.machine.energy import metered
from alignedserve.machine.gpus import GpuUse, OpenDriver
from alignedserve.machine.resources import memory
from alignedserve.protocol.figures import (
    EnergyFigures,
    Garbage,
    GpuFigures,
    MachineFigures,
    ProcessFigures,
)

_PROC = Path("/proc")
_FRESH_S = 1.0  # for which figures are not read again: a router reports at every change
FRESH_S = 5.0  # the same of the machine: where there are many cores, /proc/stat takes a millisecond


class OwnProcess:
    """The figures of this process, read at most once a second."""

    def __init__(self) -> None:
        self._figures: ProcessFigures | None = None
        self._read_at = -inf

    def figures(self, now: float) -> ProcessFigures | None:
        if now - self._read_at >= _FRESH_S:
            self._figures, self._read_at = own_process(), now
        return self._figures


def own_process() -> ProcessFigures | None:
    """Return what is known of this process; None where the system has no /proc."""
    try:
        fields = (_PROC / "self/stat").read_text().rpartition(")")[2].split()  # behind the name, which may have spaces
        num_files = len(os.listdir(_PROC / "self/fd"))
    except OSError:
        return None
    meter = metered()
    ticks, pages = os.sysconf("SC_CLK_TCK"), int(fields[21])
    return ProcessFigures(
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks,
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        num_files=num_files,
        started_at=_booted_at() + int(fields[19]) / ticks,
        python=platform.python_version(),
        garbage=tuple(Garbage(**generation) for generation in gc.get_stats()),
        fell_back=fallbacks(),
        weights=weights_kept(),
        machine=_machine().figures(),
        energy=None if meter is None else EnergyFigures(meter.joules, meter.rest_joules, meter.source),
    )


@cache
def _machine() -> MachineMeter:
    return MachineMeter()


@cache
def _booted_at() -> float:
    lines = (_PROC / "stat").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("btime "))


class MachineMeter:
    """Reads the machine at most every five seconds. Processors are counted from one reading to the next."""

    def __init__(
        self,
        gpus: Callable[[], Sequence[GpuUse]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        stat: Path = Path("/proc/stat"),
    ) -> None:
        self._gpus, self._clock, self._stat = gpus or OpenDriver().use, clock, stat
        self._figures: MachineFigures | None = None
        self._read_at, self._idle, self._ticks = -inf, 0, 0

    def figures(self) -> MachineFigures | None:
        """Return the figures; None where the system has no /proc."""
        now = self._clock()
        if now - self._read_at >= FRESH_S:
            self._figures, self._read_at = self._read(), now
        return self._figures

    def _read(self) -> MachineFigures | None:
        found = memory()
        try:
            first, *rest = self._stat.read_text().splitlines()
        except OSError:
            return None
        if found is None:
            return None
        ticks = [*map(int, first.split()[1:9])]  # user, nice, system, idle, iowait, irq, softirq, steal
        cores = sum(line.startswith("cpu") for line in rest)
        idle, passed = sum(ticks[3:5]) - self._idle, sum(ticks) - self._ticks
        busy = cores * (1 - idle / passed) if self._ticks and passed > 0 else None
        self._idle, self._ticks = self._idle + idle, self._ticks + passed
        total = found.total if found.limit is None else min(found.total, found.limit)
        gpus = tuple(GpuFigures(*use) for use in self._gpus())
        return MachineFigures(busy, cores, max(0, total - found.available), total, gpus)


_weights = ""


def note_weights(words: str) -> None:
    """Keep how this process keeps the weights of its model, and what that costs, in words: for /status."""
    global _weights
    _weights = words


def weights_kept() -> str:
    """Return what was noted; empty in a process without weights."""
    return _weights
