"""GPUs as their driver tells it, without torch: the launcher plans before any worker has a GPU, and a worker sees only
its own where Ray assigns GPUs.

Of memory all counts, not what is free: a pool that starts again finds its workers there.

    python -m alignedserve.machine.gpus      prints how many GPUs the driver has: 0 without a driver
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from itertools import combinations
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"  # part of NVIDIA's driver
_UUID_BYTES = _NAME_BYTES = 96
_READ, _NVLINK, _OK = 0, 2, 0  # two of nvmlGpuP2PCapsIndex_t, one of nvmlGpuP2PStatus_t
_MEMORY_CLOCK, _TRANSFERS = 2, 2  # of nvmlClockType_t; a clock of a GPU's memory carries two


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _NvmlUse(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent of the driver's last sample


class GpuUse(NamedTuple):
    """Each is None where the driver does not tell it, as it does not of a part of a GPU (MIG)."""

    busy: float | None  # share of the driver's last sample in which a kernel ran
    used_bytes: int | None
    total_bytes: int | None


class Gpu(NamedTuple):
    name: str
    total_bytes: int | None  # None where the driver does not tell it
    bandwidth: float  # bytes that its memory gives in a second, by clock and width; 0 where the driver does not tell it


class Link(str, Enum):
    """How two GPUs of a machine reach each other's memory."""

    NVLINK = "NVLink"
    PCIE = "PCIe"
    NONE = "none"


class Driver(NamedTuple):
    """What NVIDIA's driver says of itself and of the GPUs."""

    version: str  # such as 580.65.06
    cuda: int  # the newest major version of CUDA that it runs
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]  # of all pairs of GPUs


class OpenDriver:
    """The driver, open as long as this is there: to open it takes longer than to ask."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._open = ExitStack()
        self._nvml, self._count = self._open.enter_context(_driver(load))

    def use(self) -> list[GpuUse]:
        """Return what the machine's GPUs do, whoever uses them; none where no driver tells."""
        return [_use(self._nvml, number) for number in range(self._count)]

    def joules(self, uuid: str) -> float | None:
        """Return what the GPU with this UUID has used since its driver was loaded; None where no driver tells."""
        millijoules, device = ctypes.c_ulonglong(), self._find(uuid)
        if device is None or self._nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
            return None
        return millijoules.value / 1e3

    def num_processes(self, uuid: str) -> int:
        """Return how many processes compute on the GPU with this UUID: 1 where no driver tells."""
        count, device = ctypes.c_uint(0), self._find(uuid)
        if device is not None:  # without room for their descriptions this fails, and tells the count
            self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), None)
        return max(1, count.value)

    def limit_w(self, uuid: str) -> float | None:
        """Return the most power that the GPU with this UUID may take; None where no driver tells."""
        milliwatts, device = ctypes.c_uint(), self._find(uuid)
        if device is None or self._nvml.nvmlDeviceGetEnforcedPowerLimit(device, ctypes.byref(milliwatts)):
            return None
        return milliwatts.value / 1e3

    def _find(self, uuid: str) -> ctypes.c_void_p | None:
        devices = (_device(self._nvml, number) for number in range(self._count))
        return next((device for device in devices if device is not None and _uuid(self._nvml, device) == uuid), None)

    def close(self) -> None:
        self._open.close()


def gpu_memory(load: Callable[[str], Any] = ctypes.CDLL, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the bytes of the visible GPU that has least of them; None where no driver tells."""
    with _driver(load) as (nvml, count):
        found = [_use(nvml, number).total_bytes for number in _visible(count, environment)]
        return min((size for size in found if size is not None), default=None)


def driver(load: Callable[[str], Any] = ctypes.CDLL, environment: Mapping[str, str] = os.environ) -> Driver | None:
    """Return what the driver says of itself and of the visible GPUs; None where no driver tells."""
    with _driver(load) as (nvml, count):
        if nvml is None:
            return None
        devices = [device for number in _visible(count, environment) if (device := _device(nvml, number))]
        version, cuda = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_int()
        nvml.nvmlSystemGetDriverVersion(version, _NAME_BYTES)
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        links = tuple(_link(nvml, one, other) for one, other in combinations(devices, 2))
        return Driver(version.value.decode(), cuda.value // 1000, tuple(_gpu(nvml, each) for each in devices), links)


def gpus_reached(uuid: str, load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, bool]:
    """Return the UUIDs of this machine's other GPUs, and whether this one reads their memory (peer access)."""
    with _driver(load) as (nvml, count):
        known = {_uuid(nvml, device): device for number in range(count) if (device := _device(nvml, number))}
        own = known.pop(uuid, None)
        return {} if own is None else {name: _reads(nvml, own, device) for name, device in known.items() if name}


@contextmanager
def _driver(load: Callable[[str], Any]) -> Iterator[tuple[Any, int]]:
    """Yield the driver's library and the number of GPUs: 0 where no driver tells."""
    try:
        nvml = load(_LIBRARY)
    except OSError:
        yield None, 0
        return
    if nvml.nvmlInit_v2():
        yield None, 0
        return
    try:
        count = ctypes.c_uint()
        yield nvml, 0 if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, number: int) -> ctypes.c_void_p | None:
    device = ctypes.c_void_p()
    return None if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) else device


def _uuid(nvml: Any, device: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_UUID_BYTES)
    return "" if nvml.nvmlDeviceGetUUID(device, text, _UUID_BYTES) else text.value.decode().removeprefix("GPU-")


def _reads(nvml: Any, device: ctypes.c_void_p, other: ctypes.c_void_p, how: int = _READ) -> bool:
    status = ctypes.c_int(-1)
    return not nvml.nvmlDeviceGetP2PStatus(device, other, how, ctypes.byref(status)) and status.value == _OK


def _link(nvml: Any, device: ctypes.c_void_p, other: ctypes.c_void_p) -> Link:
    if not (_reads(nvml, device, other) and _reads(nvml, other, device)):
        return Link.NONE
    return Link.NVLINK if _reads(nvml, device, other, _NVLINK) else Link.PCIE


def _gpu(nvml: Any, device: ctypes.c_void_p) -> Gpu:
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), _NvmlMemory()
    megahertz, bits = ctypes.c_uint(), ctypes.c_uint()
    nvml.nvmlDeviceGetName(device, name, _NAME_BYTES)
    tells_size = not nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    nvml.nvmlDeviceGetMaxClockInfo(device, _MEMORY_CLOCK, ctypes.byref(megahertz))
    nvml.nvmlDeviceGetMemoryBusWidth(device, ctypes.byref(bits))
    bandwidth = _TRANSFERS * megahertz.value * 1e6 * bits.value / 8
    return Gpu(name.value.decode(errors="replace"), int(memory.total) if tells_size else None, bandwidth)


def _visible(count: int, environment: Mapping[str, str]) -> list[int]:
    """Return the numbers of the GPUs that torch sees; all where they are named otherwise than by numbers."""
    named = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [int(name) for name in named if name.strip().isdigit()]
    return [number for number in numbers if number < count] if len(numbers) == len(named) else [*range(count)]


def _use(nvml: Any, number: int) -> GpuUse:
    device, memory, use = _device(nvml, number), _NvmlMemory(), _NvmlUse()
    if device is None:
        return GpuUse(None, None, None)
    busy = None if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)) else use.gpu / 100
    if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return GpuUse(busy, None, None)
    return GpuUse(busy, int(memory.used), int(memory.total))


if __name__ == "__main__":
    print(len(found.gpus) if (found := driver()) is not None else 0)
