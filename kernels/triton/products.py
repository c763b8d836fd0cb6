"""Products with quantised weights, in Triton; blocked.py says how the weights lie.

A program computes a tile of some outputs for some rows: the weights become numbers in registers and are the left side
of `tl.dot`, so they need no shared memory. Few rows make few tiles, so then a tile's inputs are cut into splits that
programs sum up side by side; their sums are added in a fixed order by a second kernel, so results do not depend on
which program is first.

    float   weights become numbers of x's dtype, exactly but for fractional zeros, and sums are scaled group by group
    whole   rows of 16 bits become whole numbers from -127 to 127 with a scale for each, where a weight of 8 bits has
            one scale for each output: products of bytes, whose sums are exact

Which of both depends on the weight alone, never on the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.common import fp8
from alignedserve.kernels.common.blocked import BlockedLinear, BlockedWeight
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import FP8, Fp8Weight, QuantisedLinear, QuantisedWeight
from alignedserve.kernels.triton.launch import interpreting, nearest, power_of_2, processors, tuned

TILE_ROWS = (16, 32, 64, 128)  # the first that holds all rows, or the most
# Rows of a tile, so that four stages of it fit into the 99 kB of shared memory that every GPU has: of fp32, of whole
# numbers, and of 16 bits by the bits of a weight: a tile of 4 bits has twice as many inputs.
_MOST_FP32, _MOST_WHOLE, _MOST_HALVES = 32, 128, {4: 64, 8: 128}
_LIKELY_OUTS = 64  # outputs of a tile, as the number of splits takes them
_WAVES = 2  # programs for each processor that splits aim at
_LEAST_BLOCKS = 4  # of a split
_MOST_SPLITS = 32
_FINISH_WIDTH, _ROW_WIDTH = 1024, 1024
_MOST_OF_WARP = 4096  # sums
_ALL = 1 << 30  # inputs of a group that has all of them
_MOST_BYTE, _LEAST = 127, 1e-30


@triton.jit
def _added(
    acc,
    q,
    first,
    x,
    row_stride,
    row,
    has_row,
    scales,
    zeros,
    output,
    has_output,
    inputs,
    outputs,
    group,
    MIDDLE: tl.constexpr,
    LESS: tl.constexpr,
    HALF: tl.constexpr,
    WHOLE: tl.constexpr,
    TILED: tl.constexpr,
    SHIFTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add the products of HALF inputs from `first` on; q is LESS below the numbers of files, whose middle is MIDDLE."""
    at = first + tl.arange(0, HALF)
    there = at < inputs
    own = x + row.to(tl.int64)[None, :] * row_stride + at[:, None]
    rows = tl.load(own, mask=there[:, None] & has_row[None, :], other=0.0)
    if WHOLE:
        made = tl.dot(q, rows, acc, out_dtype=tl.int32)
    else:
        if WIDE:
            rows = rows.to(tl.float32)
        weight = q.to(tl.float32)
        if TILED:
            of_group = first // group * outputs + output
            used = has_output & (first < inputs)
            if SHIFTS:
                weight -= tl.load(zeros + of_group, mask=used, other=0.0).to(tl.float32)[:, None] - LESS
            else:
                weight -= MIDDLE - LESS
            scale = tl.load(scales + of_group, mask=used, other=0.0).to(tl.float32)[:, None]
            made = acc + tl.dot(weight.to(rows.dtype), rows, input_precision="ieee") * scale
        else:
            of_groups = (at // group)[None, :] * outputs + output[:, None]
            each = has_output[:, None] & there[None, :]
            if SHIFTS:
                weight -= tl.load(zeros + of_groups, mask=each, other=0.0).to(tl.float32) - LESS
            else:
                weight -= MIDDLE - LESS
            weight *= tl.load(scales + of_groups, mask=each, other=0.0).to(tl.float32)
            made = acc + tl.dot(weight.to(rows.dtype), rows, input_precision="ieee")
    return made


def _fits(config: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a tile suits the rows: sums of many rows and outputs need many warps, and so do their weights as
    floats: two come from a byte of 4 bits."""
    sums, most = config.kwargs["OUTS"] * arguments["ROWS"], _MOST_OF_WARP * config.num_warps
    return bool(sums <= most if arguments["WHOLE"] else sums * (8 // arguments["BITS"]) < most)


@tuned(
    [({"OUTS": 64}, (4,)), ({"OUTS": 128}, (4, 8))],
    key=["inputs", "outputs", "ROWS", "BITS", "WHOLE", "TILED"],
    stages=(2, 4),
    fits=_fits,
    changes=["out"],
)
@triton.jit(do_not_specialize=["rows", "blocks", "split_blocks"])  # else some numbers would have kernels of their own
def _multiply(
    x,
    row_stride,
    of_rows,
    memory,
    scales,
    zeros,
    bias,
    out,
    partial,
    rows,
    inputs,
    outputs,
    group,
    blocks,
    split_blocks,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    WHOLE: tl.constexpr,
    TILED: tl.constexpr,
    SHIFTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    has_row = row < rows
    has_output = output < outputs
    own = memory + (split * split_blocks).to(tl.int64) * outputs * HALF
    own = own + output[:, None] * HALF + tl.arange(0, HALF)[None, :]
    acc = tl.zeros((OUTS, ROWS), tl.int32 if WHOLE else tl.float32)
    for block in range(split * split_blocks, tl.minimum((split + 1) * split_blocks, blocks)):
        q = tl.load(own, mask=has_output[:, None], other=0)
        own += outputs * HALF
        if BITS == 4:
            first = block * (2 * HALF)
            acc = _added(
                *(acc, q & 15, first, x, row_stride, row, has_row, scales, zeros, output, has_output),
                *(inputs, outputs, group, 8, 0, HALF, WHOLE, TILED, SHIFTS, WIDE),
            )
            acc = _added(
                *(acc, q >> 4, first + HALF, x, row_stride, row, has_row, scales, zeros, output, has_output),
                *(inputs, outputs, group, 8, 0, HALF, WHOLE, TILED, SHIFTS, WIDE),
            )
        else:
            acc = _added(
                *(acc, q, block * HALF, x, row_stride, row, has_row, scales, zeros, output, has_output),
                *(inputs, outputs, group, 128, 128, HALF, WHOLE, TILED, SHIFTS, WIDE),
            )
    made = acc.to(tl.float32)
    if WHOLE:
        made *= tl.load(scales + output, mask=has_output, other=0.0).to(tl.float32)[:, None]
        made *= tl.load(of_rows + row, mask=has_row, other=0.0)[None, :]
    to = row.to(tl.int64)[None, :] * outputs + output[:, None]
    mask = has_output[:, None] & has_row[None, :]
    if SPLITS:
        tl.store(partial + split.to(tl.int64) * rows * outputs + to, made, mask=mask)
    else:
        if HAS_BIAS:
            made += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[:, None]
        if ADDS:
            made += tl.load(out + to, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + to, made.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "splits"])
def _finish(partial, bias, out, splits, rows, outputs, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    """Add the sums of all splits."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = output < outputs
    to = row * outputs + output
    made = tl.zeros((WIDTH,), tl.float32)
    at = partial + to
    for _ in range(splits):
        made += tl.load(at, mask=there, other=0.0)
        at += rows * outputs
    if HAS_BIAS:
        made += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        made += tl.load(out + to, mask=there, other=0.0).to(tl.float32)
    tl.store(out + to, made.to(out.dtype.element_ty), mask=there)


@triton.jit
def _shrink(
    x,
    row_stride,
    out,
    of_rows,
    inputs,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    ROUNDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write a row as numbers up to MOST, whole or of 8-bit floats, and its scale: NaN where a number is not finite."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((WIDTH,), tl.float32)
    strange = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, inputs, WIDTH):
        at = first + tl.arange(0, WIDTH)
        size = tl.abs(tl.load(x + row * row_stride + at, mask=at < inputs, other=0.0).to(tl.float32))
        finite = (size == size) & (size != float("inf"))
        strange = tl.maximum(strange, tl.where(finite, 0, 1))
        most = tl.maximum(most, tl.where(finite, size, 0.0))
    is_strange = tl.max(strange, 0) > 0
    scale = tl.maximum(tl.max(most, 0) / MOST, LEAST)
    for first in range(0, inputs, WIDTH):
        at = first + tl.arange(0, WIDTH)
        value = tl.load(x + row * row_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
        value = tl.where(is_strange, 0.0, value) / scale
        if ROUNDS:
            value = nearest(value)
        value = tl.minimum(tl.maximum(value, -MOST * 1.0), MOST * 1.0)
        tl.store(out + row * inputs + at, value.to(out.dtype.element_ty), mask=at < inputs)
    tl.store(of_rows + row, tl.where(is_strange, float("nan"), scale))


class TritonProducts:
    def quantised(self, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> QuantisedLinear:
        return BlockedLinear(self, weight, bias, dtype)

    def multiplies_fp8(self, device: torch.device, dtype: torch.dtype) -> bool:
        return fp8.why_none(device, dtype) is None

    def fp8(self, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        return fp8.fp8_linear(weight, bias, dtype, rows_in_fp8)

    def multiply(self, x: Tensor, weight: BlockedWeight, bias: Tensor | None, out: Tensor, adds: bool = False) -> None:
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        elif x.stride(1) != 1:
            x = x.contiguous()
        whole = weight.is_whole and x.dtype is not torch.float32
        of_rows = weight.scale  # not read unless whole
        if whole:
            x, of_rows = _shrunk(x, torch.int8)
        _Product(x, of_rows, weight, bias, out, adds, whole).run()


def rows_in_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    return _shrunk(rows, FP8)


def _shrunk(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows as whole numbers or 8-bit floats, and the scale of each row, [rows, 1]."""
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count, inputs = rows.shape
    out = torch.empty((count, inputs), dtype=dtype, device=rows.device)
    scale = torch.empty((count, 1), dtype=torch.float32, device=rows.device)
    whole = dtype is torch.int8
    if count:
        _shrink[(count,)](
            *(rows, rows.stride(0), out, scale, inputs),
            MOST=_MOST_BYTE if whole else fp8.MOST,
            LEAST=_LEAST,
            ROUNDS=whole,
            WIDTH=min(_ROW_WIDTH, power_of_2(inputs)),
        )
    return out, scale


class _Product:
    """Says how one product is cut into tiles and splits."""

    def __init__(
        self,
        x: Tensor,
        of_rows: Tensor,
        weight: BlockedWeight,
        bias: Tensor | None,
        out: Tensor,
        adds: bool,
        whole: bool,
    ) -> None:
        self._x, self._of_rows, self._weight, self._bias = x, of_rows, weight, bias
        self._out, self._adds, self._whole = out, adds, whole
        self._rows, self._blocks = x.shape[0], weight.memory.shape[0]
        self._tile = min(self._most_rows, next((tile for tile in TILE_ROWS if self._rows <= tile), TILE_ROWS[-1]))
        self._split_blocks = self._blocks_of_split()

    @property
    def _most_rows(self) -> int:
        if self._whole:
            return _MOST_WHOLE
        return _MOST_FP32 if self._x.dtype is torch.float32 else _MOST_HALVES[self._weight.bits]

    def _blocks_of_split(self) -> int:
        tiles = triton.cdiv(self._rows, self._tile) * triton.cdiv(self._weight.shape[0], _LIKELY_OUTS)
        wanted = triton.cdiv(_WAVES * processors(self._x.device), tiles)
        splits = max(1, min(wanted, self._blocks // _LEAST_BLOCKS, _MOST_SPLITS))
        return int(triton.cdiv(self._blocks, splits))

    def run(self) -> None:
        weight, out = self._weight, self._out
        outputs, inputs = weight.shape
        splits = triton.cdiv(self._blocks, self._split_blocks)
        shape = (splits, self._rows, outputs)
        partial = torch.empty(shape, dtype=torch.float32, device=out.device) if splits > 1 else _nothing(out.device)
        bias = self._x if self._bias is None else self._bias
        zero = weight.scale if weight.zero is None else weight.zero

        def grid(tile: Mapping[str, int]) -> tuple[int, int, int]:
            return (triton.cdiv(self._rows, self._tile), triton.cdiv(outputs, tile["OUTS"]), splits)

        ends: dict[str, Any] = {"HAS_BIAS": self._bias is not None, "ADDS": self._adds}
        _multiply[grid](
            *(self._x, self._x.stride(0), self._of_rows, weight.memory, weight.scale, zero, bias, out, partial),
            *(self._rows, inputs, outputs, _ALL if weight.scale.shape[0] == 1 else weight.group),
            *(self._blocks, self._split_blocks),
            BITS=weight.bits,
            HALF=weight.half,
            WHOLE=self._whole,
            TILED=weight.is_tiled,
            SHIFTS=weight.zero is not None,
            SPLITS=splits > 1,
            WIDE=interpreting() and self._x.dtype is torch.bfloat16,
            ROWS=self._tile,
            **ends,
        )
        if splits > 1:
            width = min(_FINISH_WIDTH, power_of_2(outputs))
            _finish[(self._rows, triton.cdiv(outputs, width))](
                partial, bias, out, splits, self._rows, outputs, WIDTH=width, **ends
            )


@cache
def _nothing(device: torch.device) -> Tensor:
    """Return what stands for sums of splits where there are none: of their dtype, by which kernels are told apart."""
    return torch.empty(1, dtype=torch.float32, device=device)
