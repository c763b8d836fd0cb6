"""The energy of the device that this process computes on: counted where the machine counts it, else modelled.

    nvml       the GPU's own counter; the process is given the same share as each other that computes there
    rapl       the counters of the processors; the process is given the share that its processor time has of all
    modelled   a GPU takes the most that it may in steps, or GPU_W where nothing tells that; without a GPU, BUSY_W for
               each processor that the process keeps busy

A counter is too coarse for one step. So `EnergyMeter` learns the device's power in steps (`busy_w`) and its power at
rest (`rest_w`), and a step's energy is its time times `busy_w`. Both are fitted by least squares to the energy between
two looks at the counter. Example: the device used 88 J in a second with 0.1 s of steps, and 364 J in a second with
0.9 s of steps. Then `busy_w` is 398 W and `rest_w` 54 W.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from alignedserve.machine.gpus import OpenDriver

# A hardware thread of a cloud's servers under full load: mean over the servers of AWS by Cloud Carbon Footprint.
BUSY_W = 3.5
GPU_W = 350.0  # the limit of an H100 with PCIe
READ_S = 1.0  # between two looks at the counter
_FIRST_READ_S = 0.1  # until the first look: steps before it are told nothing
_APART = 1e-3  # of the product of squares: looks with less different shares of steps tell the two powers not apart
_ALIKE = 5  # looks
_LEFT = 0.95  # weight of the looks before, after each
_POWERCAP, _STAT = Path("/sys/class/powercap"), Path("/proc/stat")
_TICK_S = 0.01  # USER_HZ is 100 on Linux


class Counter(NamedTuple):
    source: str
    joules: Callable[[], float]  # since some moment
    step: Callable[[float], None] = lambda _: None  # is told the seconds of each step
    busy_w: float = 0.0  # power in steps, where that is known


class Powers:
    """The power of a device in steps and at rest, of the last twenty looks or so."""

    def __init__(self, known_w: float = 0.0) -> None:
        """`known_w` is the power in steps; 0: it is learnt."""
        self.busy_w, self.rest_w, self._is_known = known_w, 0.0, known_w > 0
        self._num_alike = 0  # looks that did not tell the two apart
        self._busy2 = self._both = self._rest2 = self._used_busy = self._used_rest = 0.0  # sums of products

    def learn(self, busy_s: float, rest_s: float, joules: float) -> None:
        if self._is_known:
            return
        self._busy2 = _LEFT * self._busy2 + busy_s * busy_s
        self._both = _LEFT * self._both + busy_s * rest_s
        self._rest2 = _LEFT * self._rest2 + rest_s * rest_s
        self._used_busy = _LEFT * self._used_busy + joules * busy_s
        self._used_rest = _LEFT * self._used_rest + joules * rest_s
        apart = self._busy2 * self._rest2 - self._both * self._both
        if apart > _APART * self._busy2 * self._rest2:
            busy_w = (self._used_busy * self._rest2 - self._used_rest * self._both) / apart
            rest_w = (self._used_rest * self._busy2 - self._used_busy * self._both) / apart
            if busy_w >= rest_w >= 0:
                self.busy_w, self.rest_w = busy_w, rest_w
                return
        # Nothing tells the two apart yet, or there is but one. A look back at a rest says little of steps: that of an
        # even load that leaves most time to rests is taken after some looks, as none says more.
        self._num_alike += 1
        if not rest_s or (not self.busy_w and (busy_s > rest_s or (busy_s and self._num_alike > _ALIKE))):
            self.busy_w = joules / (busy_s + rest_s)


class EnergyMeter:
    """The threads of steps and of their pauses tell steps; any thread may ask for the joules."""

    def __init__(self, counter: Counter, devices: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        """`devices` run the same steps, and use about the same: the ranks of a worker."""
        self.source, self._read, self._tell, known_w = counter
        self._devices, self._clock = devices, clock
        self._reading, self._counting = threading.Lock(), threading.Lock()
        self._read_at, self._began_at = clock(), counter.joules()
        self._joules = self._began_at  # when it was read
        self._busy_s = 0.0  # since then
        self._powers, self._rest_joules = Powers(known_w), 0.0

    @property
    def joules(self) -> float:
        """Return what the devices have used from the start on, steps or not."""
        return self._devices * (self._count() - self._began_at)

    @property
    def rest_joules(self) -> float:
        """Return what they have used beside steps, by the last look."""
        return self._devices * max(0.0, self._rest_joules)

    def step(self, seconds: float) -> float:
        """Return the joules of a step that has ended and took this long."""
        with self._counting:
            self._busy_s += seconds
            self._tell(seconds)
            if self._clock() - self._read_at >= (READ_S if self._powers.busy_w else _FIRST_READ_S):
                self._look()
            return self._devices * self._powers.busy_w * seconds

    def _look(self) -> None:
        """Learn from what was used since the last look, and count what of it was not used in steps."""
        now, joules, busy_s = self._clock(), self._count(), self._busy_s
        passed_s, used = now - self._read_at, joules - self._joules
        self._read_at, self._joules, self._busy_s = now, joules, 0.0
        self._powers.learn(busy_s, max(0.0, passed_s - busy_s), used)
        self._rest_joules += used - self._powers.busy_w * busy_s

    def _count(self) -> float:
        with self._reading:
            return self._read()


# --- Counters


def counter_of(
    gpu: str = "", powercap: Path = _POWERCAP, stat: Path = _STAT, open_driver: Callable[[], OpenDriver] = OpenDriver
) -> Counter:
    """Return the best counter there is of the GPU with this UUID, or of the processors for a process without one."""
    if gpu:
        counted = GpuCounter(driver := open_driver(), gpu)
        if counted.tells:
            return Counter("nvml", counted.joules)
        watts = driver.limit_w(gpu) or GPU_W
        modelled = ModelledGpu(watts)
        return Counter("modelled", modelled.joules, modelled.step, watts)
    packages = [package for path in sorted(powercap.glob("intel-rapl:*")) if (package := Package.at(path)) is not None]
    if packages:
        return Counter("rapl", PackageShare(packages, stat).joules)
    return Counter("modelled", lambda: BUSY_W * time.process_time())


class GpuCounter:
    """The counter of a GPU. A look at which its driver does not answer, or has begun to count again, adds nothing."""

    def __init__(self, driver: OpenDriver, gpu: str) -> None:
        self._driver, self._gpu = driver, gpu
        self._last, self._joules = driver.joules(gpu), 0.0
        self.tells = self._last is not None

    def joules(self) -> float:
        now = self._driver.joules(self._gpu)
        if now is not None:
            share = 1 / self._driver.num_processes(self._gpu)
            self._joules += share * max(0.0, now - (self._last or 0.0))
            self._last = now
        return self._joules


class ModelledGpu:
    """A GPU without a counter, as a part of one (MIG): it takes the same power in each step, and none at rest."""

    def __init__(self, watts: float) -> None:
        self._watts, self._joules = watts, 0.0

    def step(self, seconds: float) -> None:
        self._joules += self._watts * seconds

    def joules(self) -> float:
        return self._joules


class Package:
    """The counter of a package of processors, in microjoules, which begins again at its range (powercap)."""

    def __init__(self, path: Path) -> None:
        self._energy, self._range = path / "energy_uj", int((path / "max_energy_range_uj").read_text())
        self._last = int(self._energy.read_text())
        self._joules = 0.0

    @classmethod
    def at(cls, path: Path) -> Package | None:
        """Return the package's counter; None where this is another one, or only root may read it."""
        try:
            return cls(path) if (path / "name").read_text().startswith("package") else None
        except (OSError, ValueError):
            return None

    def joules(self) -> float:
        now = int(self._energy.read_text())
        self._joules += ((now - self._last) % (self._range + 1)) / 1e6
        self._last = now
        return self._joules


class PackageShare:
    """This process's share of its machine's packages: that of its time on the processors."""

    def __init__(self, packages: Sequence[Package], stat: Path = _STAT, cpu_s: Callable[[], float] = time.process_time):
        self._packages, self._stat, self._cpu_s = packages, stat, cpu_s
        self._joules, self._counted = 0.0, 0.0
        self._own_s, self._all_s = cpu_s(), self._busy_s()

    def joules(self) -> float:
        own_s, all_s, counted = self._cpu_s(), self._busy_s(), sum(package.joules() for package in self._packages)
        if all_s > self._all_s:
            share = min(1.0, (own_s - self._own_s) / (all_s - self._all_s))
            self._joules += share * (counted - self._counted)
            self._own_s, self._all_s, self._counted = own_s, all_s, counted
        return self._joules

    def _busy_s(self) -> float:
        """Return the processor time of all processes of the machine."""
        user, nice, system, _, _, irq, softirq, *_ = map(int, self._stat.read_text().split("\n", 1)[0].split()[1:])
        return _TICK_S * (user + nice + system + irq + softirq)


# --- What this process meters, for its figures

_meter: EnergyMeter | None = None


def meters(meter: EnergyMeter) -> None:
    """Say what this process meters with."""
    global _meter
    _meter = meter


def metered() -> EnergyMeter | None:
    return _meter
