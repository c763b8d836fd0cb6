"""Copies between the device and pages, and int8, in C++."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, byref, c_int, c_int64, c_uint32, c_void_p

import torch
from torch import Tensor

from alignedserve.errors import NotFinite
from alignedserve.kernels.library import DTYPES, Library
from alignedserve.kernels.native.library import NativeLibrary


class _BlockRows(Structure):
    """The struct of csrc/kernels.h."""

    _fields_ = tuple(
        (name, c_int64)
        for name in "layers tokens slots v_after vector cache_layer row_layer row_half row_token".split()
    )


class NativeCopies(NativeLibrary):
    def __init__(self, library: Library) -> None:
        super().__init__(library)
        pointer = c_void_p
        self._gather = library.kernel("gather", *[pointer] * 5, returns=c_int)
        self._scatter = library.kernel("scatter", *[pointer] * 5, returns=c_int)
        self._crc32 = library.kernel("crc32", pointer, c_int64, c_int64, c_int64, pointer)
        rows, levels = (c_int, pointer, c_int64, c_int64), (pointer, pointer, pointer, c_int64, c_int64, c_int64)
        self._quantise = library.kernel("quantise", *rows, *levels, returns=c_int)
        self._dequantise = library.kernel("dequantise", *rows, *levels)

    # --- Between the device and pages

    def gather(self, cache: Tensor, slots: Tensor, out: Tensor) -> None:
        _copy(self._gather, cache, slots, out)

    def scatter(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        _copy(self._scatter, cache, slots, rows)

    def gather_and_sum(self, cache: Tensor, slots: Tensor, out: Tensor) -> int:
        crc = c_uint32()
        _copy(self._gather, cache, slots, out, crc)
        return crc.value

    def scatter_and_sum(self, cache: Tensor, slots: Tensor, rows: Tensor) -> int:
        crc = c_uint32()
        _copy(self._scatter, cache, slots, rows, crc)
        return crc.value

    def crc32(self, rows: Tensor) -> int:
        crc, (num, num_bytes) = c_uint32(), rows.shape
        _check(rows.dtype == torch.uint8 and rows.stride(1) == 1, "rows are bytes side by side")
        self._crc32(rows.data_ptr(), num, rows.stride(0), num_bytes, byref(crc))
        return crc.value

    # --- int8, per channel

    def quantise(self, rows: Tensor, q: Tensor, least: Tensor, step: Tensor) -> None:
        odd = self._quantise(
            *(DTYPES[rows.dtype], rows.data_ptr(), rows.stride(0), rows.stride(1)), *_levels(rows, q, least, step)
        )
        if odd:
            raise NotFinite("numbers that are to be quantised are not finite: their page stays as it is")

    def dequantise(self, q: Tensor, least: Tensor, step: Tensor, out: Tensor) -> None:
        self._dequantise(
            *(DTYPES[out.dtype], out.data_ptr(), out.stride(0), out.stride(1)), *_levels(out, q, least, step)
        )


def _copy(kernel: Callable[..., int], cache: Tensor, slots: Tensor, rows: Tensor, crc: c_uint32 | None = None) -> None:
    """Copy between the cache and the rows, and set `crc` to the CRC-32 of the rows."""
    where, slots = _block_rows(cache, slots, rows), slots.contiguous()
    into = None if crc is None else byref(crc)
    if kernel(byref(where), slots.data_ptr(), cache.data_ptr(), rows.data_ptr(), into):
        raise IndexError(f"a copy names a slot outside the {cache.shape[1]} blocks of the cache")


def _levels(rows: Tensor, q: Tensor, least: Tensor, step: Tensor) -> tuple[int, ...]:
    """Return the arguments that quantise and dequantise share."""
    groups, tokens, channels = rows.shape
    _check(tokens > 0 and rows.stride(2) == 1, "rows have at least one token, and their channels side by side")
    _check(
        q.shape == rows.shape and q.dtype == torch.uint8 and q.is_contiguous(), "q is uint8, packed, of the rows' shape"
    )
    for of_channel in (least, step):
        _check(of_channel.shape == (groups, channels), "least and step are [groups, channels]")
        _check(of_channel.dtype == torch.float32 and of_channel.is_contiguous(), "least and step are fp32, packed")
    return q.data_ptr(), least.data_ptr(), step.data_ptr(), groups, tokens, channels


def _block_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> _BlockRows:
    layers, _, block_size, kv_dim = cache.shape
    vectors = cache.view(layers, -1, kv_dim)
    _check(slots.dtype == torch.int64 and slots.dim() == 1, "slots are a list of int64")
    _check(rows.dtype == cache.dtype and rows.stride(3) == 1, "rows are vectors of the cache's dtype")
    _check(rows.shape == (layers, 2, len(slots), kv_dim), "rows are [layers, 2, tokens, kv_dim]")
    size = cache.element_size()
    strides = (stride * size for stride in rows.stride()[:3])
    return _BlockRows(
        layers, len(slots), vectors.shape[1], block_size, kv_dim * size, vectors.stride(0) * size, *strides
    )


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)
