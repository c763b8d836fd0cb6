"""Norms, rotation and activation, in Triton: a program per vector, in fp32, rounded as reference.py rounds."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.common.decoder import Norm
from alignedserve.kernels.triton.launch import pdl, power_of_2, wait_for_kernels_before


@triton.jit
def _norm(
    x,
    row_stride,
    head_stride,
    weight,
    bias,
    out,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTRED: tl.constexpr,
    WEIGHS: tl.constexpr,
    SHIFTS: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr = False,
):
    wait_for_kernels_before(PDL)
    number = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    there = at < SIZE
    value = tl.load(x + (number // HEADS) * row_stride + (number % HEADS) * head_stride + at, mask=there, other=0.0)
    normed = norm_of(value, weight, bias, eps, at, there, SIZE, CENTRED, WEIGHS, SHIFTS, WIDE)
    tl.store(out + number * SIZE + at, normed, mask=there)


@triton.jit
def norm_of(
    value,
    weight,
    bias,
    eps,
    at,
    there,
    SIZE: tl.constexpr,
    CENTRED: tl.constexpr,
    WEIGHS: tl.constexpr,
    SHIFTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return the norm of a vector, which is zero where it is not there."""
    dtype = value.dtype
    wide = value.to(tl.float32)
    if CENTRED:
        wide = tl.where(there, wide - tl.sum(wide, 0) / SIZE, 0.0)
    normed = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps))
    if not CENTRED and not WIDE:
        normed = normed.to(dtype).to(tl.float32)
    if WEIGHS:
        normed = normed * tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    if SHIFTS:
        normed = normed + tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    return normed.to(dtype)


@triton.jit
def _add_and_norm(
    x,
    row_stride,
    part,
    part_stride,
    after,
    after_bias,
    after_eps,
    weight,
    bias,
    eps,
    out,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTRED: tl.constexpr,
    WEIGHS: tl.constexpr,
    SHIFTS: tl.constexpr,
    WIDE: tl.constexpr,
    AFTER: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Add a row of parts, or the norm AFTER of it, to a row of x, and write the norm of that; both norms are alike."""
    wait_for_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    there = at < SIZE
    added = tl.load(part + row * part_stride + at, mask=there, other=0.0)
    if AFTER:
        added = norm_of(added, after, after_bias, after_eps, at, there, SIZE, CENTRED, WEIGHS, SHIFTS, WIDE)
    own = x + row * row_stride + at
    value = tl.load(own, mask=there, other=0.0)
    value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
    tl.store(own, value, mask=there)
    normed = norm_of(value, weight, bias, eps, at, there, SIZE, CENTRED, WEIGHS, SHIFTS, WIDE)
    tl.store(out + row * SIZE + at, normed, mask=there)


@triton.jit
def _rotate(
    vectors,
    row_stride,
    head_stride,
    cos,
    sin,
    angle_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    at = tl.arange(0, WIDTH)
    there = at < HALF
    first = vectors + row * row_stride + (tl.program_id(0) % HEADS) * head_stride + at
    left = tl.load(first, mask=there, other=0.0)
    right = tl.load(first + HALF, mask=there, other=0.0)
    dtype = left.dtype
    c = tl.load(cos + row * angle_stride + at, mask=there, other=0.0).to(dtype).to(tl.float32)
    s = tl.load(sin + row * angle_stride + at, mask=there, other=0.0).to(dtype).to(tl.float32)
    left = left.to(tl.float32)
    right = right.to(tl.float32)
    lc = (left * c).to(dtype).to(tl.float32)
    rs = (right * s).to(dtype).to(tl.float32)
    rc = (right * c).to(dtype).to(tl.float32)
    ls = (left * s).to(dtype).to(tl.float32)
    tl.store(first, (lc - rs).to(dtype), mask=there)
    tl.store(first + HALF, (rc + ls).to(dtype), mask=there)


@triton.jit
def _gated(
    gate_up,
    stride,
    out,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr = False,
):
    wait_for_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = at < INNER
    gate = tl.load(gate_up + row * stride + at, mask=there, other=0.0)
    up = tl.load(gate_up + row * stride + INNER + at, mask=there, other=0.0).to(tl.float32)
    dtype = gate.dtype
    tl.store(out + row * INNER + at, gated(gate.to(tl.float32), up, dtype, GELU).to(dtype), mask=there)


@triton.jit
def gated(gate, up, dtype: tl.constexpr, GELU: tl.constexpr):
    """Return silu or gelu of the gate, rounded, times up."""
    slope = gate
    if GELU:  # approximated by tanh: (1 + tanh(y)) / 2 is sigmoid(2 y)
        slope = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    return (gate / (1.0 + tl.exp(-slope))).to(dtype).to(tl.float32) * up


_GATED_WIDTH = 1024


class TritonTokens:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _normed(x, Norm(weight, None, eps, centred=False))

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return _normed(x, Norm(weight, bias, eps, centred=True))

    def add_and_norm(self, x: Tensor, part: Tensor, norm: Norm, after: Norm | None = None) -> Tensor:
        if x.shape != part.shape or x.dtype is not part.dtype or x.stride(1) != 1:
            raise ValueError(f"{tuple(part.shape)} {part.dtype} cannot be added to {tuple(x.shape)} {x.dtype}")
        if after is not None and kind_of(after) != kind_of(norm):
            part, after = _normed(part, after), None
        part, before = _rows_apart(part), norm if after is None else after
        rows, size = x.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if rows:
            _add_and_norm[(rows,)](
                *(x, x.stride(0), part, part.stride(0), *vectors_of(before, x), before.eps),
                *(*vectors_of(norm, x), norm.eps, out),
                SIZE=size,
                WIDTH=power_of_2(size),
                AFTER=after is not None,
                **kind_of(norm),
                **pdl(x.device),
            )
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        rows, count, _ = heads.shape
        if heads.stride(-1) != 1 or cos.stride() != sin.stride() or cos.stride(-1) != 1:
            raise ValueError("a head's numbers must lie side by side, and so must the cosines and sines of a row")
        half = cos.shape[-1]
        if rows and half:
            strides = (heads.stride(0), heads.stride(1))
            _rotate[(rows * count,)](
                heads, *strides, cos, sin, cos.stride(0), HEADS=count, HALF=half, WIDTH=power_of_2(half)
            )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _multiplied(gate_up, is_gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return _multiplied(gate_up, is_gelu=True)


def _multiplied(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    gate_up = _rows_apart(gate_up)
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, inner))
    width = min(_GATED_WIDTH, power_of_2(inner))
    if rows:
        grid = (rows, triton.cdiv(inner, width))
        _gated[grid](gate_up, gate_up.stride(0), out, INNER=inner, WIDTH=width, GELU=is_gelu, **pdl(out.device))
    return out


def kind_of(norm: Norm) -> dict[str, bool]:
    """Return what a kernel is compiled for."""
    weight = norm.weight
    return {
        "CENTRED": norm.centred,
        "WEIGHS": weight is not None,
        "SHIFTS": norm.bias is not None,
        "WIDE": weight is not None and weight.dtype is torch.float32,
    }


def vectors_of(norm: Norm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias; x where there is none, which is not read."""
    return x if norm.weight is None else norm.weight, x if norm.bias is None else norm.bias


def _normed(x: Tensor, norm: Norm) -> Tensor:
    """Return the norm over the last dimension of any shape."""
    by_head = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    if by_head.stride(-1) != 1:
        by_head = by_head.contiguous()
    rows, heads, size = by_head.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows * heads:
        _norm[(rows * heads,)](
            *(by_head, by_head.stride(0), by_head.stride(1), *vectors_of(norm, x), out, norm.eps),
            HEADS=heads,
            SIZE=size,
            WIDTH=power_of_2(size),
            **kind_of(norm),
            **pdl(x.device),
        )
    return out


def _rows_apart(x: Tensor) -> Tensor:
    """Return x as [rows, columns], with the columns side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
