"""How busy this machine is: its processors, its memory and its GPUs, whoever uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from alignedserve.machine.gpus import GpuUse, OpenDriver
from alignedserve.machine.resources import memory
from alignedserve.protocol.figures import GpuFigures, MachineFigures

FRESH_S = 5.0  # for which figures are not read again: where there are many cores, /proc/stat takes a millisecond


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
