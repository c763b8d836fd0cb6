"""Memory for weights and KV, which every step reads: in pages of 2 MiB where the system gives them.

A processor knows the places of some thousand pages. Of 4 KiB these are less than one layer's weights, and in a virtual
machine each that it must look up anew costs two walks through tables.

What a step computes with is ordinary memory, but kept from step to step; large pieces of it by us (`Kept`).
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import sys

import torch

_SLAB = 64 << 20
_APART = 64  # bytes: a cache line
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
_LARGEST_KEPT, _KEPT = 32 << 20, 512 << 20  # bytes: of one piece, which is the most that glibc takes, and of all


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory is taken only once it is written."""
    count = math.prod(shape)
    return torch.frombuffer(_mapped(count * dtype.itemsize), dtype=dtype, count=count).view(shape)


class Slabs:
    """Gives out parts of large pieces: of a small piece for each tensor, little would lie on large pages."""

    def __init__(self) -> None:
        self._slab: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // _APART) * _APART
        if self._slab is None or self._used + size > len(self._slab):
            self._slab, self._used = _mapped(max(_SLAB, size)), 0
        out = torch.frombuffer(self._slab, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += size
        return out


class Kept:
    """Memory for what every step makes and glibc would give back to the system, as it is larger than glibc keeps: each
    of its pages would be made anew in the next step. Who still holds a tensor keeps its memory from the next one."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._references = 0  # to it while no tensor is of it

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not _LARGEST_KEPT <= size <= _KEPT:
            return torch.empty(shape, dtype=dtype)
        if self._memory is None or len(self._memory) < size or sys.getrefcount(self._memory) > self._references:
            self._memory = _mapped(size)
            self._references = sys.getrefcount(self._memory)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


def keep_freed_memory() -> None:
    """Of this process: glibc would give a step's large tensors back to the system, and the next step would have each of
    their pages made anew. Elsewhere nothing changes.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def _mapped(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"the system has no {size >> 20} MB of memory") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
