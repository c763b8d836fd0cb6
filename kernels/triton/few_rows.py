"""Products of one to eight rows, in Triton, with what lies before and behind them: such a product takes as long as its
weight takes to be read, and a kernel between two of them reads nothing.

A program computes some outputs of all rows. One row is multiplied as it is, number by number; more rows are multiplied
on tensor cores, padded to 16. While the kernel before it ends, the first weights are brought to the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.common.decoder import Inner, Norm
from alignedserve.kernels.triton.launch import (
    interpreting,
    pdl,
    power_of_2,
    tuned,
    wait_for_kernels_before,
    weighed_norm,
)
from alignedserve.kernels.triton.tokens import gated

MOST_ROWS = 8
_PADDED = 16  # the least size of a matrix product
_NORM_WIDTH = {1: 4096, _PADDED: 512}  # numbers of a row that are squared at once
_NO_GATE = 0
AHEAD = tl.constexpr(2)  # tiles of weights that a program asks for before it waits, 16 KB
LINE = tl.constexpr(64)  # numbers of two bytes in a line of the cache


@tuned(
    [({"OUTS": outs, "DEPTH": depth}, (4,)) for outs, depth in ((4, 1024), (8, 512))],
    key=["inputs", "outputs", "ROWS", "GATE", "NORMED", "ADDS"],
    stages=(4,),
    changes=["out"],
)
@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x,
    weight,
    bias,
    norm,
    out,
    rows,
    inputs,
    outputs,
    eps,
    GATE: tl.constexpr,
    NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    NORM_WIDTH: tl.constexpr,
    OUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr = False,
):
    TALLER: tl.constexpr = 1 if ROWS == 1 else 4  # the least tile has 16 outputs then
    TILE: tl.constexpr = OUTS * TALLER
    WIDTH: tl.constexpr = DEPTH // TALLER
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    has_output = output < outputs
    row = tl.arange(0, ROWS)
    has_row = row < rows
    if PDL:
        within = tl.minimum(output, outputs - 1)
        _prefetch(weight, within, inputs, AHEAD * WIDTH)
        if GATE:
            _prefetch(weight, outputs + within, inputs, AHEAD * WIDTH)
    wait_for_kernels_before(PDL)
    dtype = x.dtype.element_ty
    of_row = x + row[:, None] * inputs
    if NORMED:
        squares = tl.zeros((ROWS, NORM_WIDTH), tl.float32)
        for first in range(0, inputs, NORM_WIDTH):
            at = first + tl.arange(0, NORM_WIDTH)
            own = tl.load(of_row + at[None, :], mask=has_row[:, None] & (at < inputs)[None, :], other=0.0)
            squares += own.to(tl.float32) * own.to(tl.float32)
        inverse = (1.0 / tl.sqrt(tl.sum(squares, 1) / inputs + eps))[:, None]
    of_output = weight + output.to(tl.int64)[:, None] * inputs
    of_up = weight + (outputs + output).to(tl.int64)[:, None] * inputs
    acc = tl.zeros((TILE, WIDTH if ROWS == 1 else ROWS), tl.float32)
    acc_up = acc
    for first in tl.range(0, inputs, WIDTH, num_stages=4):
        at = first + tl.arange(0, WIDTH)
        there = at < inputs
        own = tl.load(of_row + at[None, :], mask=has_row[:, None] & there[None, :], other=0.0)
        if NORMED:
            of_norm = tl.load(norm + at, mask=there, other=0.0)[None, :]
            own = weighed_norm(own.to(tl.float32), inverse, of_norm, dtype).to(dtype)
        if WIDE:
            own = own.to(tl.float32)
        used = has_output[:, None] & there[None, :]
        its = tl.load(of_output + at[None, :], mask=used, other=0.0)
        acc = _added(acc, its, own, ROWS, WIDE)
        if GATE:
            its = tl.load(of_up + at[None, :], mask=used, other=0.0)
            acc_up = _added(acc_up, its, own, ROWS, WIDE)
    made = _ended(acc, bias + output, has_output, ROWS, HAS_BIAS)
    if GATE:
        up = _ended(acc_up, bias + outputs + output, has_output, ROWS, HAS_BIAS)
        made = gated(made.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype, GATE == 2)
    to = out + row[None, :] * outputs + output[:, None]
    mask = has_output[:, None] & has_row[None, :]
    if ADDS:
        made += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, made.to(dtype), mask=mask)


@triton.jit
def _prefetch(weight, output, inputs, NUMBERS: tl.constexpr):
    """Have the first weights of these outputs brought to the cache that all programs share, where no kernel's writing
    is overlooked; nobody waits for them."""
    at = tl.minimum(tl.arange(0, NUMBERS // LINE) * LINE, inputs - 1)
    places = (weight + output.to(tl.int64)[:, None] * inputs + at[None, :]).to(tl.int64)
    ask: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(ask, "=r,l", [places], tl.int32, is_pure=False, pack=1)


@triton.jit
def _added(acc, weight, own, ROWS: tl.constexpr, WIDE: tl.constexpr):
    if ROWS == 1:
        acc += weight.to(tl.float32) * own.to(tl.float32)
    else:
        if WIDE:
            weight = weight.to(tl.float32)
        acc = tl.dot(weight, tl.trans(own), acc, input_precision="ieee")
    return acc


@triton.jit
def _ended(acc, bias, has_output, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the sums [outputs, rows], with the bias."""
    if ROWS == 1:
        acc = tl.sum(acc, 1)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias, mask=has_output, other=0.0).to(tl.float32)[:, None]
    return acc


class TritonFewRows:
    def few_rows(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm | None = None,
        inner: Inner | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        rows, inputs = x.shape
        if not 0 < rows <= MOST_ROWS or not x.is_contiguous() or x.dtype is not weight.dtype:
            raise ValueError(f"{tuple(x.shape)} {x.dtype} with steps {x.stride()} are not a few rows side by side")
        gate = _NO_GATE if inner is None else {Inner.SILU: 1, Inner.GELU: 2}[inner]
        outputs = weight.shape[0] // 2 if gate else weight.shape[0]
        made = x.new_empty((rows, outputs)) if out is None else out
        if made.shape != (rows, outputs) or not made.is_contiguous() or weight.shape[1] != inputs:
            raise ValueError(f"{tuple(x.shape)} by {tuple(weight.shape)} are not {tuple(made.shape)}")
        padded = 1 if rows == 1 else _PADDED
        of_norm = None if norm is None else norm.weight
        _few_rows[lambda tile: (triton.cdiv(outputs, tile["OUTS"] * (1 if rows == 1 else 4)),)](
            *(x, weight, x if bias is None else bias, x if of_norm is None else of_norm, made),
            *(rows, inputs, outputs, 0.0 if norm is None else norm.eps),
            GATE=gate,
            NORMED=of_norm is not None,
            HAS_BIAS=bias is not None,
            ADDS=out is not None,
            WIDE=interpreting() and x.dtype is torch.bfloat16,
            ROWS=padded,
            NORM_WIDTH=min(_NORM_WIDTH[padded], power_of_2(inputs)),
            **pdl(x.device),
        )
        return made
