"""Write K and V in int8, in Triton; kernels/common/int8_kv.py defines it."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.common.int8_kv import MOST_LEVEL
from alignedserve.kernels.triton.launch import power_of_2
from alignedserve.kernels.triton.rounding import bits_of_bf16, from_bits_of_bf16, nearest

_TINY = torch.finfo(torch.float32).tiny


@triton.jit
def _write_head(x, to, scale_to, dim, there, MOST: tl.constexpr, TINY: tl.constexpr):
    x = x.to(tl.float32)
    strange = tl.max(tl.where((x == x) & (tl.abs(x) != float("inf")), 0, 1), 0)
    largest = tl.max(tl.abs(x), 0) / MOST
    kept = bits_of_bf16(tl.where(strange == 0, largest, float("nan")))
    kept = tl.where(from_bits_of_bf16(kept) < TINY, 0, kept).to(tl.int16)
    scale = from_bits_of_bf16(kept)
    inverse = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    level = nearest(tl.minimum(tl.maximum(x * inverse, -MOST), MOST))
    tl.store(to + dim, tl.where(strange == 0, level, 0.0).to(tl.int8), mask=there)
    tl.store(scale_to, kept)


@triton.jit
def _write_int8(
    cache,
    scales,
    slots,
    k,
    k_stride,
    v,
    v_stride,
    apart,
    VECTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, WIDTH)
    there = dim < HEAD_DIM
    of_k = tl.load(slots + row) * VECTOR
    of_v = of_k + apart * VECTOR
    levels = head * HEAD_DIM
    behind = tl.num_programs(1) * HEAD_DIM
    x = tl.load(k + row * k_stride + levels + dim, mask=there, other=0.0)
    _write_head(x, cache + of_k + levels, scales + (of_k + behind) // 2 + head, dim, there, MOST, TINY)
    x = tl.load(v + row * v_stride + levels + dim, mask=there, other=0.0)
    _write_head(x, cache + of_v + levels, scales + (of_v + behind) // 2 + head, dim, there, MOST, TINY)


def write_int8(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor, heads: int) -> None:
    """Put K and V, whose numbers lie side by side, into these slots of a layer's cache."""
    head_dim = k.shape[1] // heads
    _write_int8[(len(slots), heads)](
        *(cache, scales_of(cache), slots, k, k.stride(0), v, v.stride(0), cache.shape[1]),
        VECTOR=cache.shape[-1],
        HEAD_DIM=head_dim,
        WIDTH=power_of_2(head_dim),
        MOST=MOST_LEVEL,
        TINY=_TINY,
    )


def scales_of(cache: Tensor) -> Tensor:
    """Return the cache as the bits of its scales: two bytes each, at even places."""
    return cache.view(torch.int16)
