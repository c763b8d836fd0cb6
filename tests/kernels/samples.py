"""Tensors to try kernels on: places beside their numbers in memory are NaN, so a kernel that reads one shows it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int64

import torch
from hypothesis import strategies as st

from alignedserve.kernels.native.kernels import Native

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
_ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def packed(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a contiguous copy with NaN after its end."""
    count = math.prod(shape)
    memory = torch.full((count + 64,), float("nan"), dtype=dtype)
    memory[:count] = torch.randn(count, generator=generator).to(dtype)
    return memory[:count].view(shape)


def strided(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a copy with NaN between the rows."""
    *rows, width = shape
    wide = torch.full((*rows, width + 7), float("nan"), dtype=dtype)
    wide[..., 3 : 3 + width] = packed(generator, dtype, *shape)
    return wide[..., 3 : 3 + width]


def rounding(dtype: torch.dtype) -> float:
    """Return the largest relative error of a number rounded to the dtype."""
    return _ROUNDING[dtype]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def ahead_of(kernels: Native, most_bytes: int) -> Iterator[None]:
    """Limit what is prefetched at once beside linear layers: attention there goes on in smaller slices."""
    limit = kernels.library.kernel("limit_ahead", c_int64)
    limit(most_bytes)
    try:
        yield
    finally:
        limit(3 << 16)


@contextmanager
def scratch_of(kernels: Native, most_bytes: int) -> Iterator[None]:
    """Limit the scratch memory of each thread and kernel."""
    limit = kernels.library.kernel("limit_scratch", c_int64)
    limit(most_bytes)
    try:
        yield
    finally:
        limit(2**62)
