"""Tests of what the driver's library says of GPUs; the library is a fake with its C interface."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from alignedserve.machine.gpus import Gpu, GpuUse, Link, OpenDriver, driver, gpu_memory, gpus_reached

GIB = 1 << 30
_READING, _OVER_NVLINK = 0, 2  # of nvmlGpuP2PCapsIndex_t


class FakeNvml:
    """GPUs with so many bytes each; None is a GPU that its driver has lost."""

    def __init__(
        self,
        *sizes: int | None,
        starts: bool = True,
        links: Collection[tuple[int, int]] = (),
        nvlinks: Collection[tuple[int, int]] = (),
    ) -> None:
        """`links` are the GPUs of which the first reads the memory of the second, of these `nvlinks` over NVLink."""
        self._sizes, self._starts, self._links, self._nvlinks, self.open = sizes, starts, links, nvlinks, 0

    def nvmlInit_v2(self) -> int:
        self.open += self._starts
        return int(not self._starts)

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._sizes)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, device: Any) -> int:
        device._obj.value = number + 1
        return int(self._sizes[number] is None)

    def nvmlDeviceGetUUID(self, device: Any, text: Any, length: int) -> int:
        text.value = f"GPU-{device.value - 1}".encode()[:length]
        return 0

    def nvmlDeviceGetP2PStatus(self, device: Any, other: Any, capability: int, status: Any) -> int:
        links = {_READING: self._links, _OVER_NVLINK: self._nvlinks}[capability]
        status._obj.value = 0 if (device.value - 1, other.value - 1) in links else 5
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, length: int) -> int:
        text.value = b"580.65.06"[:length]
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, number: Any) -> int:
        number._obj.value = 13_000
        return 0

    def nvmlDeviceGetName(self, device: Any, text: Any, length: int) -> int:
        text.value = b"NVIDIA H100 80GB HBM3"[:length]
        return 0

    def nvmlDeviceGetMaxClockInfo(self, device: Any, clock: int, megahertz: Any) -> int:
        assert clock == 2, "of its memory"
        megahertz._obj.value = 2619
        return 0

    def nvmlDeviceGetMemoryBusWidth(self, device: Any, bits: Any) -> int:
        bits._obj.value = 5120
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, infos: None) -> int:
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total = self._sizes[device.value - 1]
        memory._obj.used = memory._obj.total // 4
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: Any, use: Any) -> int:
        """A GPU of a size that is no power of two is a part of one, whose driver tells no use."""
        size = self._sizes[device.value - 1]
        use._obj.gpu = 37
        return int(size is None or size.bit_count() > 1)


def size_on(nvml: FakeNvml, visible: str | None = None) -> int | None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = gpu_memory(lambda _: nvml, environment)
    assert nvml.open == 0
    return found


@pytest.mark.parametrize(
    ("visible", "least"),
    [(None, 20), ("0,1", 60), ("1", 60), ("2", 20), ("GPU-5d0f, GPU-99ab", 20), ("0,7", 80)],
)
def test_the_gpu_with_least_that_torch_sees_counts(visible: str | None, least: int) -> None:
    assert size_on(FakeNvml(80 * GIB, 60 * GIB, 20 * GIB), visible) == least * GIB


def test_a_gpu_that_is_lost_says_nothing() -> None:
    assert size_on(FakeNvml(None, 60 * GIB)) == 60 * GIB
    assert size_on(FakeNvml(None)) is None


def test_without_a_driver_nobody_knows() -> None:
    def absent(_: str) -> Any:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    assert gpu_memory(absent, {}) is None
    assert size_on(FakeNvml(80 * GIB, starts=False)) is None
    assert size_on(FakeNvml()) is None
    assert gpus_reached("0", absent) == {}


def test_the_driver_tells_whose_memory_a_gpu_reads() -> None:
    nvml = FakeNvml(80, 80, None, 80, links={(0, 1), (3, 0)})
    assert gpus_reached("0", lambda _: nvml) == {"1": True, "3": False}, "without the lost GPU"
    assert gpus_reached("3", lambda _: nvml) == {"0": True, "1": False}
    assert gpus_reached("of MIG", lambda _: nvml) == {}
    assert nvml.open == 0


def test_an_open_driver_tells_what_each_gpu_does_and_what_it_does_not_know() -> None:
    nvml = FakeNvml(64, 96, None)
    driver = OpenDriver(lambda _: nvml)
    assert driver.use() == [GpuUse(0.37, 16, 64), GpuUse(None, 24, 96), GpuUse(None, None, None)]
    assert nvml.open == 1
    driver.close()
    assert nvml.open == 0


def test_without_a_driver_there_is_no_gpu_to_tell_of() -> None:
    assert OpenDriver(lambda _: FakeNvml(80, starts=False)).use() == []


def test_the_driver_says_what_it_runs_and_how_gpus_reach_each_other() -> None:
    both = {(0, 1), (1, 0), (0, 2), (2, 0)}
    nvml = FakeNvml(80 * GIB, 80 * GIB, 80 * GIB, links=both, nvlinks={(0, 1), (1, 0)})
    found = driver(lambda _: nvml, {})
    assert found is not None
    assert (found.version, found.cuda) == ("580.65.06", 13)
    assert found.gpus[0] == Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 2 * 2619e6 * 5120 / 8)
    assert found.links == (Link.NVLINK, Link.PCIE, Link.NONE), "of 0 and 1, 0 and 2, 1 and 2"
    assert nvml.open == 0


def test_only_visible_gpus_are_told() -> None:
    found = driver(lambda _: FakeNvml(80 * GIB, 80 * GIB), {"CUDA_VISIBLE_DEVICES": "1"})
    assert found is not None
    assert len(found.gpus) == 1


def test_without_a_driver_nothing_is_told() -> None:
    def missing(_: str) -> None:
        raise OSError

    assert driver(missing) is None
    assert driver(lambda _: FakeNvml(starts=False)) is None
