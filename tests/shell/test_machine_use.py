"""Tests of how busy a machine is, by the files that its kernel has."""

from __future__ import annotations

from pathlib import Path

from alignedserve.machine.gpus import GpuUse
from alignedserve.machine.resources import memory
from alignedserve.protocol.figures import GpuFigures
from alignedserve.shell.process import FRESH_S, MachineMeter

GPUS = [GpuUse(0.5, 10, 20), GpuUse(None, None, None)]


class Kernel:
    """A machine of two cores: ticks of user, nice, system, idle, iowait, irq, softirq and steal."""

    def __init__(self, folder: Path) -> None:
        self.stat, self.now = folder / "stat", 100.0
        self.write(1000, 0, 500, 8000, 500, 0, 0, 0)

    def write(self, *ticks: int) -> None:
        whole = f"cpu  {' '.join(map(str, ticks))} 0 0"
        self.stat.write_text(f"{whole}\ncpu0 1 1\ncpu1 1 1\nintr 5 0 0\n")

    def meter(self) -> MachineMeter:
        return MachineMeter(lambda: GPUS, lambda: self.now, self.stat)


def test_processors_are_counted_from_one_reading_to_the_next(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    meter = kernel.meter()
    first = meter.figures()
    assert first is not None
    assert (first.busy_cores, first.cores) == (None, 2), "nothing has passed yet"
    kernel.write(1200, 0, 600, 8600, 550, 0, 0, 50)  # 350 of 1,000 ticks; waiting for a disk is idle
    kernel.now += FRESH_S
    assert (again := meter.figures()) is not None
    assert again.busy_cores is not None
    assert abs(again.busy_cores - 0.7) < 1e-9


def test_it_is_not_read_again_while_it_is_fresh(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    meter = kernel.meter()
    first = meter.figures()
    kernel.write(9000, 0, 500, 8000, 500, 0, 0, 0)
    kernel.now += FRESH_S - 0.1
    assert meter.figures() is first


def test_memory_and_gpus_are_those_of_the_machine(tmp_path: Path) -> None:
    told = Kernel(tmp_path).meter().figures()
    assert told is not None
    assert told.gpus == (GpuFigures(0.5, 10, 20), GpuFigures(None, None, None))
    found = memory()
    assert found is not None
    assert told.total_bytes == min(found.total, found.limit or found.total)
    assert 0 < told.used_bytes < told.total_bytes


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert MachineMeter(lambda: GPUS, stat=tmp_path / "absent").figures() is None
