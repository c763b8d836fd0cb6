"""Attention over paged blocks, in C++."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from alignedserve.kernels.common.int8_kv import check_dtypes, heads_written, num_kv_heads
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans, TextRows
from alignedserve.kernels.library import DTYPES, KEPT, Library
from alignedserve.kernels.native.library import NativeLibrary


class NativeAttention(NativeLibrary):
    def __init__(self, library: Library) -> None:
        super().__init__(library)
        pointer = c_void_p
        cache = (c_int, pointer, c_int64)  # the dtype of K and V, their address, and how many heads they have
        self._write = library.kernel("write", c_int, *cache, c_int64, pointer, *(pointer, c_int64) * 2)
        self._attend = library.kernel("attend", c_int, pointer, *(c_int64,) * 4, *cache, pointer, pointer, pointer)
        self._attend_latent = library.kernel(
            "attend_latent", c_int, pointer, *(c_int64,) * 5, pointer, pointer, c_float, pointer
        )
        heads = (pointer, c_int64, c_int64)
        self._attend_texts = library.kernel(
            "attend_texts", c_int, *heads * 3, c_int64, c_int64, pointer, c_int64, c_int64, c_float, pointer
        )

    def write(self, cache: Tensor, spans: Spans, k: Tensor, v: Tensor) -> None:
        for numbers in (k, v):
            check_dtypes(f"K and V are {k.dtype} and", numbers.dtype, cache)
        (k_stride, k_step), (v_stride, v_step) = k.stride(), v.stride()
        if k_step != 1 or v_step != 1:
            return self.write(cache, spans, k.contiguous(), v.contiguous())
        heads, kv_dim = heads_written(cache, k.shape[1]), k.shape[1]
        self._write(
            *(DTYPES[k.dtype], KEPT[cache.dtype], cache.data_ptr(), heads, kv_dim // heads, spans.table),
            *(k.data_ptr(), k_stride, v.data_ptr(), v_stride),
        )
        return None

    def attend(self, query: Tensor, cache: Tensor, spans: Spans, scoring: Scoring) -> Tensor:
        check_dtypes("queries are", query.dtype, cache)
        row_stride, head_stride, step = query.stride()
        if step != 1:
            return self.attend(query.contiguous(), cache, spans, scoring)
        _, heads, head_dim = query.shape
        kv_heads = num_kv_heads(cache, head_dim)
        if heads % kv_heads:
            raise ValueError(f"{heads} heads of {head_dim} do not divide among {kv_heads} heads of K")
        scoring.check(heads)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._attend(
            *(DTYPES[query.dtype], query.data_ptr(), row_stride, head_stride, heads, head_dim, KEPT[cache.dtype]),
            *(cache.data_ptr(), kv_heads, spans.table, scoring.in_c, out.data_ptr()),
        )
        return out

    def attend_latent(self, query: Tensor, cache: Tensor, spans: Spans, scale: float, rank: int) -> Tensor:
        row_stride, head_stride, step = query.stride()
        if step != 1:
            return self.attend_latent(query.contiguous(), cache, spans, scale, rank)
        rows, heads, size = query.shape
        if query.dtype is not cache.dtype:
            raise TypeError(f"queries are {query.dtype}, the cache {cache.dtype}: they must be the same")
        if size != 2 * cache.shape[-1] or not 0 < rank <= size:
            raise ValueError(f"queries of {size} with V of {rank} do not fit halves of {cache.shape[-1]}")
        out = query.new_empty((rows, heads, rank))
        self._attend_latent(
            *(DTYPES[query.dtype], query.data_ptr(), row_stride, head_stride, heads, size, rank),
            *(cache.data_ptr(), spans.table, scale, out.data_ptr()),
        )
        return out

    def attend_texts(
        self, query: Tensor, k: Tensor, v: Tensor, texts: TextRows, scale: float, window: int | None = None
    ) -> Tensor:
        rows, heads, head_dim = query.shape
        for numbers in (query, k, v):
            if numbers.shape != query.shape or numbers.dtype is not query.dtype:
                raise ValueError(f"query, K and V are {tuple(query.shape)} {query.dtype}, and {tuple(numbers.shape)}")
        if rows != texts.num_rows:
            raise ValueError(f"the texts have {texts.num_rows} rows, the query has {rows}")
        placed = [x if x.stride(2) == 1 else x.contiguous() for x in (query, k, v)]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._attend_texts(
            DTYPES[query.dtype],
            *(number for x in placed for number in (x.data_ptr(), x.stride(0), x.stride(1))),
            *(heads, head_dim, texts.bounds.data_ptr(), len(texts.lengths), rows if window is None else window, scale),
            out.data_ptr(),
        )
        return out
