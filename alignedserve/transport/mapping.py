"""Memory of a device that other processes of the machine map: a worker's cache, and what ranks sum through.

Two kinds of memory have the same interface. A handle of a few hundred bytes names the memory, and another process makes
a tensor from it. Of a cache that process only reads, and gives the tensor up when the worker has ended.

    CPU   a file in shared memory, which lives as long as a process maps it; its name goes when the worker ends
    GPU   CUDA's IPC handle, for processes on the same GPU or on one that reads its memory, which the process need not
          see otherwise; torch counts its users
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from alignedserve.machine.shared_files import DEVICE_CACHE, alone, fill, unlink


class NotMapped(Exception):
    """Raised where this process cannot map the other worker's device cache."""


class Maps(Protocol):
    def handle(self, cache: Tensor) -> bytes:
        """Return a handle, once for each process that maps the cache."""

    def map(self, handle: bytes) -> Tensor:
        """Return the cache that the handle names, mapped as long as the tensor lives. Raises NotMapped."""

    def close(self) -> None:
        """Let no more processes map this worker's cache."""


class CacheFile:
    """The device cache of a worker on CPUs, in a file that no other process writes to."""

    def __init__(self, directory: Path, prefix: str, name: str) -> None:
        """Map only caches whose names begin with `prefix`."""
        self._directory, self._prefix, self._name = directory, prefix, name
        self._fd: int | None = None

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Make the file, with all of its memory allocated, as for the arena."""
        path, size = self._directory / self._name, math.prod(shape) * dtype.itemsize
        with alone(self._directory):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        try:
            fill(self._directory, self._fd, size, DEVICE_CACHE)
        except BaseException:
            self.close()
            raise
        return torch.frombuffer(mmap.mmap(self._fd, size), dtype=dtype).view(shape)

    def handle(self, cache: Tensor) -> bytes:
        return _packed(cache, file=self._name)

    def map(self, handle: bytes) -> Tensor:
        shape, dtype, says = _unpacked(handle)
        name, size = str(says.get("file", "")), math.prod(shape) * dtype.itemsize
        if not name.startswith(self._prefix) or "/" in name:
            raise NotMapped(f"{name!r} is no device cache of this deployment")
        try:
            fd = os.open(self._directory / name, os.O_RDONLY)
            try:
                memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise NotMapped(f"the device cache {name} cannot be mapped: {error}") from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of read-only memory, which is intended here
            return torch.frombuffer(memory, dtype=dtype).view(shape)

    def close(self) -> None:
        if self._fd is not None:
            with alone(self._directory):
                unlink(self._directory / self._name, self._fd)
                os.close(self._fd)
            self._fd = None


class CudaMaps:
    """The device caches of workers on GPUs that read each other's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def handle(self, cache: Tensor) -> bytes:
        _, handle, size, offset, counter, counter_at, event, awaits = cache.untyped_storage()._share_cuda_()
        said: dict[str, Any] = {"size": size, "offset": offset, "counter_at": counter_at, "awaits": awaits}
        said |= {"handle": handle.hex(), "counter": counter.hex(), "event": event.hex()}
        return _packed(cache, **said, first=cache.storage_offset())

    def map(self, handle: bytes) -> Tensor:
        shape, dtype, says = _unpacked(handle)
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                *(self._device.index or 0, bytes.fromhex(says["handle"]), says["size"], says["offset"]),
                *(bytes.fromhex(says["counter"]), says["counter_at"], bytes.fromhex(says["event"]), says["awaits"]),
            )
        except (RuntimeError, KeyError, ValueError) as error:
            raise NotMapped(f"CUDA does not map the other worker's device cache: {error}") from None
        strides = torch.empty(shape, device="meta").stride()
        there = torch.empty(0, dtype=dtype, device=self._device)
        return there.set_(storage, int(says["first"]), shape, strides)

    def close(self) -> None: ...


def _packed(cache: Tensor, **more: Any) -> bytes:
    if not cache.is_contiguous():
        raise AssertionError("a device cache is one piece")
    return json.dumps({"shape": list(cache.shape), "dtype": str(cache.dtype).removeprefix("torch."), **more}).encode()


def _unpacked(handle: bytes) -> tuple[torch.Size, torch.dtype, dict[str, Any]]:
    try:
        says = json.loads(handle)
        shape, dtype = torch.Size(says["shape"]), getattr(torch, says["dtype"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotMapped("the other worker sent something that is no handle") from None
    if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 1:
        raise NotMapped("the other worker sent something that is no handle")
    return shape, dtype, says
