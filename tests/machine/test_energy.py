"""Tests of the energy of steps: from counters where there are some, else modelled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.machine.energy import (
    GPU_W,
    READ_S,
    Counter,
    EnergyMeter,
    GpuCounter,
    Package,
    PackageShare,
    counter_of,
)
from alignedserve.machine.gpus import OpenDriver
from tests.machine.test_gpus import FakeNvml

REST_W, STEP_W = 70.0, 400.0


class Device:
    """A device with a clock, which uses one power in steps and another at rest."""

    def __init__(self) -> None:
        self.now = self.joules = 0.0

    def passes(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.joules += watts * seconds

    def meter(self, devices: int = 1) -> EnergyMeter:
        return EnergyMeter(Counter("nvml", lambda: self.joules), devices, lambda: self.now)


pieces = st.tuples(st.floats(0.001, 0.3), st.floats(0.0, 0.5))


@given(st.lists(pieces, min_size=1, max_size=20))
def test_what_steps_are_told_is_what_the_device_used_in_them(load: list[tuple[float, float]]) -> None:
    device = Device()
    meter = device.meter()
    device.passes(60.0, REST_W)
    told = used = 0.0
    for step_s, idle_s in 100 * load:
        device.passes(idle_s, REST_W)
        device.passes(step_s, STEP_W)
        told, used = told + meter.step(step_s), used + STEP_W * step_s
    unknown = STEP_W * 2 * READ_S  # the first steps, before the power is known
    assert told == pytest.approx(used, rel=0.05, abs=unknown)
    assert told + meter.rest_joules == pytest.approx(meter.joules, rel=0.05, abs=unknown)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_an_even_load_is_told_something(share: float) -> None:
    """Nothing tells steps from rests apart, if each look has the same share of them: the mean is told."""
    device = Device()
    meter, told, at_first = device.meter(), 0.0, 0.0
    for look in range(40):
        device.passes(1 - share, REST_W)
        device.passes(share, STEP_W)
        told += meter.step(share)
        at_first = told if look < 20 else at_first
    assert told - at_first == pytest.approx(share * meter.joules / 2, rel=0.01)


def test_a_step_that_ends_beside_another_is_counted() -> None:
    """A step in a pause ends on the thread of steps while another thread reads the result of a step."""
    device = Device()
    meter = device.meter()
    beside = threading.Thread(target=lambda: meter.step(1.0))

    class Seconds(float):
        def __radd__(self, so_far: float) -> float:
            beside.start()
            beside.join(0.2)
            return so_far + float(self)

    meter.step(Seconds(1.0))
    beside.join()
    device.passes(3.0, STEP_W)
    meter.step(1.0)
    assert meter.rest_joules == 0.0


def test_ranks_use_what_one_of_them_uses_each() -> None:
    device = Device()
    meter = device.meter(devices=4)
    for _ in range(5):
        device.passes(1.0, STEP_W)
        meter.step(1.0)
    assert meter.step(1.0) == 4 * STEP_W
    assert meter.joules == 4 * device.joules


# --- Counters


def packages(root: Path, *microjoules: int, most: int = 999) -> Path:
    """Write the kernel's files of packages, and of what is no package."""
    for number, counted in enumerate((*microjoules, 0)):
        folder = root / f"intel-rapl:{number}"
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(f"package-{number}\n" if number < len(microjoules) else "psys\n")
        (folder / "energy_uj").write_text(f"{counted}\n")
        (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return root


def test_the_counter_of_a_package_begins_again_at_its_range(tmp_path: Path) -> None:
    package = Package.at(packages(tmp_path, 990) / "intel-rapl:0")
    assert package is not None
    for counted, microjoules in ((995, 5), (4, 14), (4, 14), (500, 510)):
        packages(tmp_path, counted)
        assert package.joules() == pytest.approx(microjoules / 1e6)


def test_a_process_has_its_share_of_the_packages(tmp_path: Path) -> None:
    """Of 100 ticks of the machine in which two packages used 3 J in all, the process had 25."""
    stat, own_s = tmp_path / "stat", [1.0]
    stat.write_text("cpu  100 0 0 900 5 0 0 0 0 0\ncpu0 100 0 0 900 5 0 0 0 0 0\n")
    counters = [Package(packages(tmp_path, 0, 0, most=10**9) / f"intel-rapl:{number}") for number in (0, 1)]
    share = PackageShare(counters, stat, lambda: own_s[0])
    assert share.joules() == 0.0
    packages(tmp_path, 1_000_000, 2_000_000, most=10**9)
    stat.write_text("cpu  160 10 20 1000 5 5 5 0 0 0\n")
    own_s[0] += 0.25
    assert share.joules() == pytest.approx(0.75)
    assert share.joules() == pytest.approx(0.75), "no time has passed"


def test_the_best_counter_is_used(tmp_path: Path) -> None:
    assert counter_of(powercap=packages(tmp_path, 0)).source == "rapl"
    modelled = counter_of(powercap=tmp_path / "none")
    assert modelled.source == "modelled"
    before = modelled.joules()
    assert sum(range(1_000_000)) > 0, "it computes"
    assert modelled.joules() > before


class CountingNvml(FakeNvml):
    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, millijoules: Any) -> int:
        millijoules._obj.value = 1_500 * device.value
        return int(device.value == 3)


@pytest.mark.parametrize(("gpu", "joules"), [("0", 1.5), ("1", 3.0), ("2", None), ("9", None)])
def test_a_gpu_tells_its_energy(gpu: str, joules: float | None) -> None:
    driver = OpenDriver(lambda _: CountingNvml(1, 1, 1))
    assert driver.joules(gpu) == joules


class MoodyNvml(FakeNvml):
    """A driver that answers as it is told to: None is a failure."""

    answers: Sequence[int | None] = ()

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, millijoules: Any) -> int:
        first, *self.answers = self.answers
        millijoules._obj.value = first or 0
        return int(first is None)


def test_a_look_at_which_a_driver_does_not_answer_adds_nothing() -> None:
    nvml = MoodyNvml(1)
    nvml.answers = (9_000_000_000, 9_000_001_000, None, 9_000_003_000, 500, 700)
    counted = GpuCounter(OpenDriver(lambda _: nvml), "0")
    assert [counted.joules() for _ in range(5)] == pytest.approx([1.0, 1.0, 3.0, 3.0, 3.2]), "the fourth after a reload"


class SharedNvml(MoodyNvml):
    """A GPU on which two processes compute, and which may take 700 W."""

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, infos: None) -> int:
        assert count._obj.value == 0, "there is room for none"
        count._obj.value = 2
        return 7

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 700_000
        return 0


def test_workers_that_share_a_gpu_share_its_energy() -> None:
    """Each of them metered the whole GPU."""
    nvml = SharedNvml(1)
    nvml.answers = (1_000, 1_000, 3_000, 7_000)
    counter = counter_of("0", open_driver=lambda: OpenDriver(lambda _: nvml))
    assert counter.source == "nvml"
    assert [counter.joules() for _ in range(3)] == pytest.approx([0.0, 1.0, 3.0])


@pytest.mark.parametrize(("uuid", "watts"), [("0", 700.0), ("MIG-a part", GPU_W)])
def test_a_gpu_without_a_counter_takes_its_limit_in_steps(uuid: str, watts: float) -> None:
    """It was given the energy of this process's processors."""
    nvml, device = SharedNvml(1), Device()
    nvml.answers = (None,) * 9
    meter = EnergyMeter(counter_of(uuid, open_driver=lambda: OpenDriver(lambda _: nvml)), clock=lambda: device.now)
    assert meter.source == "modelled"
    told = 0.0
    for _ in range(100):
        device.passes(0.5, 0.0)
        told += meter.step(0.25)
    assert meter.joules == pytest.approx(25 * watts)
    assert told == pytest.approx(25 * watts, rel=0.02)


def test_without_a_driver_no_gpu_tells_its_energy() -> None:
    assert OpenDriver(lambda _: FakeNvml(starts=False)).joules("0") is None
