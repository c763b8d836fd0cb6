"""Memory for weights and KV, which every step reads: in pages of 2 MiB where the system provides them.

A processor caches the addresses of some thousand pages. With pages of 4 KiB this covers less than one layer's weights,
and in a virtual machine each address that it must look up again costs two walks through page tables.

A step computes in ordinary memory, but this memory is kept from step to step; large pieces are kept by `Kept`.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import torch
from torch import Tensor

from alignedserve.kvpool.arena.arena import POPULATE_WRITE

_SLAB = 64 << 20
_LARGE = 2 << 20  # bytes of a page
_APART = 64  # bytes: a cache line
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
_LARGEST_KEPT, _KEPT = 32 << 20, 512 << 20  # bytes of one piece (the most that glibc accepts), bytes of all pieces


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take memory only once they are written."""
    count = math.prod(shape)
    return torch.frombuffer(_mapped(count * dtype.itemsize), dtype=dtype, count=count).view(shape)


def map_ahead(cache: Tensor, threads: int, most_s: float = 2.0, most_bytes: int = 512 << 20) -> None:
    """Have the system map the first blocks of a device cache in all layers, within these limits.

    Otherwise a step that writes to a large page of each layer for the first time waits until the system has cleared
    them: 24 MB, which take 3 to 60 ms. 512 MB take 0.03 to 0.1 s, or 1.1 s where a virtual machine's host has to find
    the memory; a cache may have all that is free, and what nothing is written to is for others.
    """
    libc, layers, until = ctypes.CDLL(None), cache.shape[0], perf_counter() + most_s
    in_layer = cache.nbytes // layers

    def map_page(layer: int, first: int) -> None:
        if perf_counter() < until:
            address = cache.data_ptr() + layer * in_layer + first
            begin = address // mmap.PAGESIZE * mmap.PAGESIZE  # the system maps whole pages
            size = address + min(_LARGE, in_layer - first) - begin
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), POPULATE_WRITE)  # or, if it cannot, steps wait

    mapped = min(in_layer, most_bytes // layers)
    pages = [(layer, first) for first in range(0, mapped, _LARGE) for layer in range(layers)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(map_page, *zip(*pages, strict=True)))  # raises what has gone wrong


class Slabs:
    """Cuts tensors out of large pieces of memory: a small piece for each tensor would rarely lie on large pages."""

    def __init__(self) -> None:
        self._slab: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, in the current piece if it fits there, else in a new piece."""
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // _APART) * _APART
        if self._slab is None or self._used + size > len(self._slab):
            self._slab, self._used = _mapped(max(_SLAB, size)), 0
        out = torch.frombuffer(self._slab, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += size
        return out


class KeptMemory:
    """Memory for a tensor that every step makes and that is larger than glibc keeps.

    glibc would give it back to the system, and the system would make each of its pages again in the next step. While a
    tensor is still in use, the next tensor gets other memory.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._references = 0  # reference count of the memory while no tensor uses it

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, in the kept memory if its size is within the limits."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not _LARGEST_KEPT <= size <= _KEPT:
            return torch.empty(shape, dtype=dtype)
        if self._memory is None or len(self._memory) < size or sys.getrefcount(self._memory) > self._references:
            self._memory = _mapped(size)
            self._references = sys.getrefcount(self._memory)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


def keep_freed_memory() -> None:
    """Make glibc keep the memory of a step's large tensors for this process.

    Otherwise glibc gives it back to the system, which makes each page again in the next step. Without glibc this
    changes nothing.
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
