"""Rounding in Triton: what its versions, and its interpreter, do not all have."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest(x):
    """Return the nearest whole number, of two the even one, as torch does: all versions have floor, and no more."""
    down = tl.floor(x)
    odd_down = (down * 0.5 - tl.floor(down * 0.5)) > 0.0
    up = ((x - down) > 0.5) | (((x - down) == 0.5) & odd_down)
    return down + tl.where(up, 1.0, 0.0)


@triton.jit
def bits_of_bf16(x):
    """Return the bits of a number, rounded to bf16 as torch does."""
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, near, 0x7FC0).to(tl.int16)


@triton.jit
def from_bits_of_bf16(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
