"""Copies between the device and pages, and int8, in Triton. A page is on the CPU: one copy moves its vectors."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.reference import ENLARGE, LARGEST, LEVELS, TINY_STEP
from alignedserve.kernels.triton.launch import nearest, power_of_2

_CHANNELS = 128
_TOKENS = 64


@triton.jit
def _move(
    cache,
    layer_stride,
    apart,
    slots,
    rows,
    of_layer,
    of_half,
    of_token,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TO_CACHE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    half = tl.program_id(2).to(tl.int64)
    at = tl.arange(0, WIDTH)
    there = at < SIZE
    here = cache + layer * layer_stride + (tl.load(slots + token) + half * apart) * SIZE + at
    page = rows + layer * of_layer + half * of_half + token * of_token + at
    if TO_CACHE:
        tl.store(here, tl.load(page, mask=there), mask=there)
    else:
        tl.store(page, tl.load(here, mask=there), mask=there)


@triton.jit
def _quantise(
    rows,
    of_group,
    of_token,
    q,
    q_group,
    q_token,
    least,
    step,
    tokens,
    channels,
    LEVELS: tl.constexpr,
    TINY: tl.constexpr,
    ENLARGE: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    low = tl.full((WIDTH,), float("inf"), tl.float32)
    high = tl.full((WIDTH,), -float("inf"), tl.float32)
    strange = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        mask = (token < tokens)[:, None] & there[None, :]
        at = group * of_group + token.to(tl.int64)[:, None] * of_token + channel[None, :]
        x = tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)
        finite = (x == x) & (tl.abs(x) != float("inf"))
        strange = tl.maximum(strange, tl.max(tl.where(finite, 0, 1), 0))
        low = tl.minimum(low, tl.min(tl.where(mask, x, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(mask, x, -float("inf")), 0))
    apart = (high * 0.5 - low * 0.5) / (LEVELS * 0.5)
    by = tl.where(apart > 0.0, tl.where(apart < TINY, ENLARGE, 0.5), 0.0)
    inverse = tl.where(apart > 0.0, 1.0 / tl.where(apart > 0.0, apart * by, 1.0), 0.0)
    for first in range(0, tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        mask = (token < tokens)[:, None] & there[None, :]
        at = group * of_group + token.to(tl.int64)[:, None] * of_token + channel[None, :]
        x = tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)
        exact = (x * by[None, :] - (low * by)[None, :]) * inverse[None, :]
        level = tl.minimum(tl.maximum(nearest(exact), 0.0), LEVELS * 1.0)
        to = group * q_group + token.to(tl.int64)[:, None] * q_token + channel[None, :]
        tl.store(q + to, level.to(tl.uint8), mask=mask)
    tl.store(least + group * channels + channel, low, mask=there)
    tl.store(step + group * channels + channel, tl.where(strange > 0, float("nan"), apart), mask=there)


@triton.jit
def _expand(
    cache,
    layer_stride,
    apart,
    slots,
    q,
    of_layer,
    of_half,
    of_token,
    least,
    step,
    LARGEST: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    half = tl.program_id(2).to(tl.int64)
    at = tl.arange(0, WIDTH)
    there = at < SIZE
    channel = (layer * 2 + half) * SIZE + at
    level = tl.load(q + layer * of_layer + half * of_half + token * of_token + at, mask=there, other=0).to(tl.float32)
    half_way = tl.load(step + channel, mask=there, other=0.0) * (level * 0.5)
    low = tl.load(least + channel, mask=there, other=0.0)
    value = tl.minimum(tl.maximum(low + half_way + half_way, -LARGEST), LARGEST)
    to = cache + layer * layer_stride + (tl.load(slots + token) + half * apart) * SIZE + at
    tl.store(to, value.to(cache.dtype.element_ty), mask=there)


class TritonCopies:
    def gather(self, cache: Tensor, slots: Tensor, out: Tensor) -> None:
        if out.device == cache.device and out.stride(-1) == 1:
            _moved(cache, slots, out, to_cache=False)
            return
        rows = torch.empty(out.shape, dtype=cache.dtype, device=cache.device)
        _moved(cache, slots, rows, to_cache=False)
        out.copy_(rows, non_blocking=out.is_contiguous())  # else torch copies through a buffer and waits for it

    def scatter(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        rows = rows.to(cache.device, non_blocking=True)
        _moved(cache, slots, rows if rows.stride(-1) == 1 else rows.contiguous(), to_cache=True)

    def quantise(self, rows: Tensor, q: Tensor, least: Tensor, step: Tensor) -> None:
        groups, tokens, channels = rows.shape
        width = min(_CHANNELS, power_of_2(channels))
        _quantise[(groups, triton.cdiv(channels, width))](
            *(rows, rows.stride(0), rows.stride(1), q, q.stride(0), q.stride(1), least, step, tokens, channels),
            LEVELS=LEVELS,
            TINY=TINY_STEP,
            ENLARGE=ENLARGE,
            TOKENS=_TOKENS,
            WIDTH=width,
        )

    def expand(self, cache: Tensor, slots: Tensor, q: Tensor, least: Tensor, step: Tensor) -> None:
        layers, halves, tokens, size = q.shape
        if tokens:
            _expand[(tokens, layers, halves)](
                *(cache, cache.stride(0), cache.shape[2], on_device(slots, cache.device)),
                *(q, q.stride(0), q.stride(1), q.stride(2), least.contiguous(), step.contiguous()),
                LARGEST=LARGEST,
                SIZE=size,
                WIDTH=power_of_2(size),
            )


def _moved(cache: Tensor, slots: Tensor, rows: Tensor, *, to_cache: bool) -> None:
    layers, halves, tokens, size = rows.shape
    if tokens:
        _move[(tokens, layers, halves)](
            *(cache, cache.stride(0), cache.shape[2], on_device(slots, cache.device), rows),
            *(rows.stride(0), rows.stride(1), rows.stride(2)),
            SIZE=size,
            WIDTH=power_of_2(size),
            TO_CACHE=to_cache,
        )
