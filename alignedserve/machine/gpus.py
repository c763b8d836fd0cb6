"""The memory of GPUs as their driver tells it, without torch: the launcher plans before any worker has a GPU.

All of it counts, not what is free: a pool that starts again finds its workers there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"  # part of NVIDIA's driver


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memory(load: Callable[[str], Any] = ctypes.CDLL, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the bytes of the visible GPU that has least of them; None where no driver tells."""
    try:
        nvml = load(_LIBRARY)
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        found = [_size(nvml, number) for number in _visible(count.value, environment)]
        return min((size for size in found if size is not None), default=None)
    finally:
        nvml.nvmlShutdown()


def _visible(count: int, environment: Mapping[str, str]) -> list[int]:
    """Return the numbers of the GPUs that torch sees; all where they are named otherwise than by numbers."""
    named = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [int(name) for name in named if name.strip().isdigit()]
    return [number for number in numbers if number < count] if len(numbers) == len(named) else [*range(count)]


def _size(nvml: Any, number: int) -> int | None:
    device, memory = ctypes.c_void_p(), _NvmlMemory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)):
        return None
    if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    return int(memory.total)
