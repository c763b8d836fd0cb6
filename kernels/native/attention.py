"""Attention over paged blocks, in C++."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from alignedserve.kernels.common.spans import Spans
from alignedserve.kernels.library import DTYPES, Library
from alignedserve.kernels.native.library import NativeLibrary

NO_WINDOW = 2**62  # more tokens than any request has


class NativeAttention(NativeLibrary):
    def __init__(self, library: Library) -> None:
        super().__init__(library)
        pointer = c_void_p
        cache = (pointer, c_int64, pointer)  # its kv_dim, and the spans
        self._write = library.kernel("write", c_int, *cache, pointer, c_int64, pointer, c_int64)
        self._attend = library.kernel("attend", c_int, pointer, *(c_int64,) * 4, *cache, c_float, c_int64, pointer)

    def write(self, cache: Tensor, spans: Spans, k: Tensor, v: Tensor) -> None:
        dtype = cache.dtype
        if k.dtype is not dtype or v.dtype is not dtype:
            raise TypeError(f"K and V are {k.dtype} and {v.dtype}, the cache {dtype}: they must be the same")
        (k_stride, k_step), (v_stride, v_step) = k.stride(), v.stride()
        if k_step != 1 or v_step != 1:
            return self.write(cache, spans, k.contiguous(), v.contiguous())
        kv_dim = cache.shape[-1]
        self._write(
            DTYPES[dtype], cache.data_ptr(), kv_dim, spans.table, k.data_ptr(), k_stride, v.data_ptr(), v_stride
        )
        return None

    def attend(self, query: Tensor, cache: Tensor, spans: Spans, scale: float, window: int | None = None) -> Tensor:
        dtype = cache.dtype
        if query.dtype is not dtype:
            raise TypeError(f"queries are {query.dtype}, the cache {dtype}: they must be the same")
        row_stride, head_stride, step = query.stride()
        if step != 1:
            return self.attend(query.contiguous(), cache, spans, scale, window)
        _, heads, head_dim = query.shape
        kv_dim = cache.shape[-1]
        if kv_dim % head_dim or heads * head_dim % kv_dim:
            raise ValueError(f"{heads} heads of {head_dim} do not divide among K of {kv_dim}")
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._attend(
            *(DTYPES[dtype], query.data_ptr(), row_stride, head_stride, heads, head_dim),
            *(cache.data_ptr(), kv_dim, spans.table, scale, window or NO_WINDOW, out.data_ptr()),
        )
        return out
