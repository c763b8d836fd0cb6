"""The experts of a mixture, all at once, in Triton; common/experts.py defines it.

Which experts a step needs stays on the device. Pairs of a row and one of its experts are brought into blocks of ROWS
pairs that share an expert; with two experts for each row and blocks of four:

    row       0      1      2      3           block 0 (expert 1)   block 1 (expert 3)   block 2
    chosen    1 3    3 1    1 3    1 3    ──▶  0  3  4  6           1  2  5  7           none
    pair      0 1    2 3    4 5    6 7

There are as many blocks as any choice can need; those that this one does not need compute nothing, so a step can be
captured. Of up to 16 rows, which one block can hold, each program finds the pairs of its expert itself, and no table is
made. The choice itself has a program for each row. A program of the products computes a tile of outputs for one
block: the weights are the left side of `tl.dot`. First come gate and up and what both make, then down, whose inputs are
cut into splits where few blocks make few tiles; at last each row sums what its experts made, in their order, so no
result depends on which program is first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.architectures.routing import Routing, Scores
from alignedserve.kernels.common.experts import HALF, LEAST_SUM, ExpertWeights
from alignedserve.kernels.triton.launch import aligned, interpreting, power_of_2, processors, tuned

TILE_ROWS = (16, 32, 64, 128)  # the first that holds the pairs of an expert where all have as many, or the most
_MOST_FP32 = 32  # rows of a tile
_SMALL_ROWS = 32  # of blocks that take longer to read an expert's weights than to multiply with them
_SMALL_DEPTH = 32  # inputs of a tile of fp32
_ALL = 1 << 30  # inputs of a group that has all of them
_UNIT = 128  # inputs of a split are a multiple of it, and of every tile
_LIKELY_OUTS = 64  # outputs that a tile is taken to have when the number of splits is chosen
_WAVES = 2  # programs for each processor that splits aim at
_LEAST_UNITS = 4  # of a split
_MOST_SPLITS = 16
_SCANNED = 1024  # pairs at a time
_COUNTED_BY_ALL, _PART = 512, 128  # pairs that each program counts itself, and at a time: a launch takes as long
_SUM_WIDTH = 1024
_MOST_OF_WARP = 4096  # sums
_MOST_TILE = 16 << 10  # bytes of a tile of weights
_SHARED = 200 << 10  # bytes of shared memory that all stages of a tile may take, on GPUs that have most


@triton.jit
def _route(
    logits,
    stride,
    bias,
    chosen,
    shares,
    factor,
    EXPERTS: tl.constexpr,
    ALL: tl.constexpr,
    TAKEN: tl.constexpr,
    GROUPS: tl.constexpr,
    TAKEN_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALISED: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Choose the experts of a row, one after another, the best first."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, ALL)
    there = at < EXPERTS
    scores = tl.load(logits + row * stride + at, mask=there, other=-float("inf"))
    if SOFTMAX:
        powers = tl.exp(scores - tl.max(scores, 0))
        scores = powers / tl.sum(powers, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    wished = tl.where(there, scores, -float("inf"))
    if BIASED:
        wished += tl.load(bias + at, mask=there, other=0.0)
    if GROUPS > 1:
        group = at // (EXPERTS // GROUPS)
        worth = tl.full((ALL,), -float("inf"), tl.float32)
        for number in range(GROUPS):
            own = tl.where(group == number, wished, -float("inf"))
            best = tl.max(own, 0)
            if BIASED:
                first = tl.min(tl.where(own == best, at, ALL), 0)
                best += tl.max(tl.where(at == first, -float("inf"), own), 0)
            worth = tl.where(group == number, best, worth)
        visible = tl.zeros((ALL,), tl.int32)
        for _ in range(TAKEN_GROUPS):
            best_group = tl.min(tl.where(worth == tl.max(worth, 0), group, GROUPS), 0)
            visible = tl.where(group == best_group, 1, visible)
            worth = tl.where(group == best_group, -float("inf"), worth)
        wished = tl.where(visible > 0, wished, -float("inf"))
    wished = tl.where(wished == wished, wished, -float("inf"))  # a row that is no number has experts too
    place = tl.full((ALL,), -1, tl.int32)
    for number in range(TAKEN):
        is_best = (wished == tl.max(wished, 0)) & (place < 0) & there
        place = tl.where(at == tl.min(tl.where(is_best, at, ALL), 0), number, place)
        wished = tl.where(place >= 0, -float("inf"), wished)
    share = tl.where(place >= 0, scores, 0.0)
    if NORMALISED:
        share = share / (tl.sum(share, 0) + LEAST)
    tl.store(chosen + row * TAKEN + place, at.to(tl.int64), mask=place >= 0)
    tl.store(shares + row * TAKEN + place, share * factor, mask=place >= 0)


@triton.jit(do_not_specialize=["pairs"])
def _count(chosen, counts, pairs, WIDTH: tl.constexpr):
    """Count the pairs of an expert."""
    expert = tl.program_id(0)
    count = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, pairs, WIDTH):
        at = first + tl.arange(0, WIDTH)
        count += tl.where(tl.load(chosen + at, mask=at < pairs, other=-1) == expert, 1, 0)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _place(
    chosen,
    counts,
    order,
    owners,
    pairs,
    blocks,
    EXPERTS: tl.constexpr,
    ALL: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNTED: tl.constexpr,
    PART: tl.constexpr,
):
    """Write the pairs of an expert into its blocks, in their order, and its number as the owner of these blocks.

    Where the pairs of experts are not COUNTED, each program counts those of all, PART at a time.
    """
    expert = tl.program_id(0)
    each = tl.arange(0, ALL)
    if COUNTED:
        count = tl.load(counts + each, mask=each < EXPERTS, other=0)
    else:
        count = tl.zeros((ALL,), tl.int32)
        for first in range(0, pairs, PART):
            at = first + tl.arange(0, PART)
            own = tl.load(chosen + at, mask=at < pairs, other=-1)
            count += tl.sum(tl.where(own[None, :] == each[:, None], 1, 0), 1)
    needed = (count + (ROWS - 1)) // ROWS
    first_block = tl.sum(tl.where(each < expert, needed, 0), 0)
    end_block = first_block + tl.sum(tl.where(each == expert, needed, 0), 0)
    for block in range(first_block, end_block):
        tl.store(owners + block, expert)
    place = first_block * ROWS
    for first in range(0, pairs, WIDTH):
        at = first + tl.arange(0, WIDTH)
        own = tl.where(tl.load(chosen + at, mask=at < pairs, other=-1) == expert, 1, 0)
        tl.store(order + place + tl.cumsum(own, 0) - 1, at, mask=own > 0)
        place += tl.sum(own, 0)
    rest = place + tl.arange(0, ROWS)
    tl.store(order + rest, tl.zeros((ROWS,), tl.int32) + pairs, mask=rest < end_block * ROWS)
    if expert == EXPERTS - 1:
        for first in range(end_block, blocks, ALL):
            tl.store(owners + first + each, tl.full((ALL,), -1, tl.int32), mask=first + each < blocks)


@triton.jit
def _numbers(q, zero, like, FLOATS: tl.constexpr, ON_CHIP: tl.constexpr, SHIFTS: tl.constexpr):
    """Return what bytes stand for, but for their scale, in the dtype of `like`: exact where zeros are whole."""
    if FLOATS and ON_CHIP:
        number = q.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    elif FLOATS:  # sign, exponent and mantissa move to their places in fp32, whose exponents are 120 larger
        bits = (q.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
        number = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
        number = tl.where((q & 127) == 127, float("nan"), number)
    else:
        number = (q.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)  # 2^23 more than q
        if SHIFTS:
            number = number - 8388608.0 - zero
        else:
            number -= 8388608.0 + zero
    return number.to(like.dtype)


@triton.jit
def _added(
    acc,
    own,
    used,
    rows,
    upper,
    scale,
    zero,
    has_output,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    ON_CHIP: tl.constexpr,
    SHIFTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add the products of a tile of weights with rows; those of the upper halves of bytes are with `upper` rows."""
    weight = tl.load(own, mask=used, other=0)
    if BITS == 0:
        if WIDE:
            weight = weight.to(tl.float32)
        acc = tl.dot(weight, rows, acc, input_precision="ieee")
    else:
        less = 1 << (BITS - 1)  # the zero where there is no other
        if SHIFTS:
            less = tl.load(zero, mask=has_output, other=0.0).to(tl.float32)[:, None]
        if BITS == 4:
            number = _numbers(weight & 15, less, rows, FLOATS, ON_CHIP, SHIFTS)
            made = tl.dot(number, rows, input_precision="ieee")
            number = _numbers(weight >> 4, less, rows, FLOATS, ON_CHIP, SHIFTS)
            made = tl.dot(number, upper, made, input_precision="ieee")
        else:
            made = tl.dot(_numbers(weight, less, rows, FLOATS, ON_CHIP, SHIFTS), rows, input_precision="ieee")
        acc += made * tl.load(scale, mask=has_output, other=0.0).to(tl.float32)[:, None]
    return acc


def _fits(config: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a tile suits the rows, the dtype, the groups and the shared memory: few inputs of fp32, which has
    no tensor cores; many sums need many warps."""
    outs, depth = config.kwargs["OUTS"], config.kwargs["DEPTH"]
    size, sides, bits = arguments["x"].dtype.itemsize, 1 + arguments["GATED"], arguments["BITS"]
    if (size == 4 or arguments["GROUP"] % 64 != 0) != (depth == _SMALL_DEPTH) or arguments["GROUP"] % depth:
        return False
    tile = outs * depth * (bits or 8 * size) // 8
    staged = (sides * tile + arguments["ROWS"] * depth * size) * config.num_stages
    sums = sides * outs * arguments["ROWS"] * (2 if bits else 1)  # those of a tile are scaled before they are added
    return bool(tile <= _MOST_TILE and staged <= _SHARED and sums <= _MOST_OF_WARP * config.num_warps)


@tuned(
    [
        ({"OUTS": 64, "DEPTH": _SMALL_DEPTH}, (4, 8)),
        ({"OUTS": 64, "DEPTH": 64}, (4, 8)),
        ({"OUTS": 64, "DEPTH": 128}, (4,)),
        ({"OUTS": 128, "DEPTH": 64}, (8,)),
        ({"OUTS": 128, "DEPTH": 128}, (8,)),
    ],
    key=["inputs", "outputs", "ROWS", "GATED", "ALONE", "FEW", "BITS", "FLOATS", "GROUP"],
    stages=(3, 4),
    fits=_fits,
)
@triton.jit(do_not_specialize=["pairs", "split_units"])
def _by_expert(
    x,
    row_stride,
    owners,
    order,
    shares,
    weights,
    biases,
    scales,
    zeros,
    scale,
    out,
    limit,
    slope,
    pairs,
    inputs,
    outputs,
    split_units,
    TAKEN: tl.constexpr,
    UNIT: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    WEIGHS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALONE: tl.constexpr,
    FEW: tl.constexpr,
    CHOSEN: tl.constexpr,
    EACH: tl.constexpr,
    EXPERTS: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    ON_CHIP: tl.constexpr,
    SHIFTS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply the rows of a block with the weight of its expert; TAKEN pairs in a row read the same row of x.

    FEW rows, each with CHOSEN experts, are no more than a block has: there each of EXPERTS has a block, or each pair,
    and the first pair of an expert has those of all rows.
    BITS are those of a quantised weight, or 0; of 4 bits HALF inputs lie in lower halves, then HALF in upper ones.
    """
    block = tl.program_id(0)
    split = tl.program_id(2)
    row = tl.arange(0, ROWS)
    if FEW:
        expert = tl.where(pairs >= EXPERTS, block, tl.load(order + block).to(tl.int32))
        number = tl.arange(0, EACH)
        each = row[:, None] * CHOSEN + number[None, :]
        its = tl.load(order + each, mask=(number < CHOSEN)[None, :] & (each < pairs), other=-1)
        pair = tl.min(tl.where(its == expert, each, pairs), 1)
        first_pair = tl.min(pair, 0)
        if (first_pair >= pairs) | ((pairs < EXPERTS) & (first_pair != block)):
            return
    else:
        expert = tl.load(owners + block)
        if expert < 0:
            return
        pair = tl.where(row == 0, block, pairs) if ALONE else tl.load(order + block * ROWS + row)
    has_row = pair < pairs
    output = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    has_output = output < outputs
    begin = split * (split_units * UNIT)
    end = tl.minimum(begin + split_units * UNIT, inputs)
    dtype = x.dtype.element_ty
    SIDES: tl.constexpr = 2 if GATED else 1
    STEP: tl.constexpr = DEPTH // 2 if BITS == 4 else DEPTH  # numbers or bytes of an output
    at = tl.arange(0, STEP)
    if BITS == 4:
        depth = at // HALF * (2 * HALF) + at % HALF
        at += begin // 2
        of_output = tl.cdiv(inputs, 2 * HALF) * HALF
    else:
        depth = at
        at += begin
        of_output = inputs
    weight = tl.load(weights + expert).to(tl.pointer_type(tl.uint8 if BITS else dtype))
    own = tl.multiple_of(weight, 16) + output.to(tl.int64)[:, None] * of_output + at[None, :]
    of_rows = x + (pair // TAKEN).to(tl.int64)[None, :] * row_stride + (begin + depth)[:, None]
    to_up = outputs.to(tl.int64) * of_output
    own_scale = tl.load(scales + expert).to(tl.pointer_type(scale.dtype.element_ty)) + output
    own_zero = tl.load(zeros + expert).to(tl.pointer_type(scale.dtype.element_ty)) + output
    acc = tl.zeros((OUTS, ROWS), tl.float32)
    raised = tl.zeros((OUTS, ROWS), tl.float32)
    for first in range(begin, end, DEPTH):
        there = first + depth < inputs
        rows = tl.load(of_rows, mask=there[:, None] & has_row[None, :], other=0.0)
        upper = rows
        if BITS == 4:
            upper_there = first + depth + HALF < inputs
            upper = tl.load(of_rows + HALF, mask=upper_there[:, None] & has_row[None, :], other=0.0)
        if WIDE:
            rows = rows.to(tl.float32)
            upper = upper.to(tl.float32)
        used = has_output[:, None] & there[None, :]
        group = first // GROUP * (SIDES * outputs)
        acc = _added(
            *(acc, own, used, rows, upper, own_scale + group, own_zero + group, has_output),
            *(BITS, FLOATS, ON_CHIP, SHIFTS, WIDE),
        )
        if GATED:
            raised = _added(
                *(raised, own + to_up, used, rows, upper, own_scale + group + outputs, own_zero + group + outputs),
                *(has_output, BITS, FLOATS, ON_CHIP, SHIFTS, WIDE),
            )
        own += STEP
        of_rows += DEPTH
    if WEIGHS:
        share = tl.load(shares + pair, mask=has_row, other=0.0)[None, :]
        acc *= share
        raised *= share
    if HAS_BIAS:
        bias = tl.load(biases + expert).to(tl.pointer_type(dtype)) + output
        once = has_output & (split == 0)
        acc += tl.load(bias, mask=once, other=0.0).to(tl.float32)[:, None]
        if GATED:
            raised += tl.load(bias + outputs, mask=once, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if CLAMPED:  # by `where`, which leaves NaN as it is
            acc = tl.where(acc > limit, limit, acc)
            raised = tl.where(raised > limit, limit, tl.where(raised < -limit, -limit, raised)) + 1.0
            acc = raised * acc / (1.0 + tl.exp(-slope * acc))
        else:
            acc = raised * acc / (1.0 + tl.exp(-acc))
    to = (split * pairs + pair).to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=has_output[:, None] & has_row[None, :])


@triton.jit(do_not_specialize=["pairs", "splits"])
def _sum(
    made,
    shares,
    out,
    row_stride,
    pairs,
    outputs,
    splits,
    TAKEN: tl.constexpr,
    WEIGHS: tl.constexpr,
    ADDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write what the experts of a row made, each with its share, or add it to the row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = at < outputs
    own = out + row * row_stride + at
    total = tl.load(own, mask=there, other=0.0).to(tl.float32) if ADDS else tl.zeros((WIDTH,), tl.float32)
    for number in range(TAKEN):
        pair = row * TAKEN + number
        of_pair = tl.zeros((WIDTH,), tl.float32)
        for split in range(splits):
            of_pair += tl.load(made + (split * pairs + pair) * outputs + at, mask=there, other=0.0).to(tl.float32)
        if WEIGHS:
            of_pair *= tl.load(shares + pair)
        total += of_pair
    tl.store(own, total.to(out.dtype.element_ty), mask=there)


class TritonExperts:
    @property
    def captures_experts(self) -> bool:
        """Return whether nothing waits to learn which experts run: not where torch replaces this kernel."""
        return isinstance(getattr(self.add_experts, "__self__", self), TritonExperts)

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        (rows, experts), taken = logits.shape, routing.chosen
        chosen = torch.empty((rows, taken), dtype=torch.long, device=logits.device)
        shares = torch.empty((rows, taken), dtype=torch.float32, device=logits.device)
        if rows:
            _route[(rows,)](
                *(logits, logits.stride(0), logits if bias is None else bias, chosen, shares, float(routing.factor)),
                EXPERTS=experts,
                ALL=power_of_2(experts),
                TAKEN=taken,
                GROUPS=routing.groups,
                TAKEN_GROUPS=routing.chosen_groups,
                SOFTMAX=routing.scores is Scores.SOFTMAX,
                BIASED=bias is not None,
                NORMALISED=routing.is_normalised,
                LEAST=LEAST_SUM,
                num_warps=1,
            )
        return chosen, shares

    def add_experts(
        self, x: Tensor, experts: ExpertWeights, chosen: Tensor, shares: Tensor, out: Tensor | None = None
    ) -> Tensor:
        adds = out is not None
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.dtype is not experts.dtype:
            raise ValueError(f"rows of {x.dtype} do not fit experts of {experts.dtype}")
        if x.shape != out.shape or x.shape[1] != experts.hidden or out.stride(1) != 1:
            raise ValueError(f"rows {tuple(x.shape)} and sums {tuple(out.shape)} do not fit {experts.hidden} numbers")
        if not len(x):
            return out
        x = x if x.stride(1) == 1 else x.contiguous()
        blocks = _ExpertBlocks(chosen.contiguous(), shares.float().contiguous(), experts)
        inner = x.new_empty((blocks.pairs, experts.inner))
        blocks.multiply(x, inner, experts.ups[0].bias is not None, 1, is_gated=True)
        splits = blocks.splits_of(experts.hidden, experts.inner)
        dtype = torch.float32 if splits > 1 or blocks.are_small else x.dtype  # many pairs would take long to write
        made = torch.empty((splits, blocks.pairs, experts.hidden), dtype=dtype, device=x.device)
        blocks.multiply(inner, made, experts.downs[0].bias is not None, splits, is_gated=False)
        width = min(_SUM_WIDTH, power_of_2(experts.hidden))
        _sum[(len(x), triton.cdiv(experts.hidden, width))](
            *(made, blocks.shares, out, out.stride(0), blocks.pairs, experts.hidden, splits),
            TAKEN=chosen.shape[1],
            WEIGHS=not experts.weighs_inputs,
            ADDS=adds,
            WIDTH=width,
        )
        return out


class _ExpertBlocks:
    """The pairs of a step's rows and experts, in blocks that share an expert."""

    def __init__(self, chosen: Tensor, shares: Tensor, experts: ExpertWeights) -> None:
        self.shares, self.pairs, self._experts = shares, chosen.numel(), experts
        count, self._taken = len(experts), chosen.shape[1]
        self._rows = tile_rows(self.pairs, count, experts.dtype)
        self._is_alone, self._are_few = len(chosen) == 1, 1 < len(chosen) <= TILE_ROWS[0]  # a row's experts all differ
        used = min(count, self.pairs)
        self._most = used + (0 if self._are_few else (self.pairs - used) // self._rows)
        self._owners = self._order = chosen
        if len(chosen) > TILE_ROWS[0]:
            sizes = [aligned(size) for size in (count, self._most, self._most * self._rows)]
            tables = torch.empty(sum(sizes), dtype=torch.int32, device=chosen.device)
            counts, self._owners, self._order = tables.split(sizes)
            is_counted = self.pairs > _COUNTED_BY_ALL
            if is_counted:
                _count[(count,)](chosen, counts, self.pairs, WIDTH=_SCANNED)
            _place[(count,)](
                *(chosen, counts, self._order, self._owners, self.pairs, self._most),
                EXPERTS=count,
                ALL=power_of_2(count),
                ROWS=self._rows,
                WIDTH=_SCANNED if is_counted else _COUNTED_BY_ALL,
                COUNTED=is_counted,
                PART=_PART,
            )

    @property
    def are_small(self) -> bool:
        """Return whether blocks are as small as those of decode steps."""
        return self._rows <= _SMALL_ROWS

    def splits_of(self, outputs: int, inputs: int) -> int:
        """Return into how many splits inputs are cut."""
        units = triton.cdiv(inputs, _UNIT)
        tiles = self._most * triton.cdiv(outputs, _LIKELY_OUTS)
        wanted = triton.cdiv(_WAVES * processors(self.shares.device), tiles)
        splits = max(1, min(wanted, units // _LEAST_UNITS, _MOST_SPLITS))
        return int(triton.cdiv(units, triton.cdiv(units, splits)))

    def multiply(self, x: Tensor, out: Tensor, has_bias: bool, splits: int, *, is_gated: bool) -> None:
        """Write what up and gate, or down, make of the rows of x."""
        experts, outputs, inputs = self._experts, out.shape[-1], x.shape[1]
        weights, biases, scales, zeros = experts.addresses.chunk(2)[0 if is_gated else 1]
        clamp, packing = experts.clamp, experts.packings[0 if is_gated else 1]

        def grid(tile: Mapping[str, int]) -> tuple[int, int, int]:
            return (self._most, triton.cdiv(outputs, tile["OUTS"]), splits)

        _by_expert[grid](
            *(x, x.stride(0), self._owners, self._order, self.shares, weights, biases, scales, zeros),
            *(x if packing is None else packing.scale, out),
            *(0.0 if clamp is None else clamp.limit, 0.0 if clamp is None else clamp.slope),
            *(self.pairs, inputs, outputs, triton.cdiv(triton.cdiv(inputs, _UNIT), splits)),
            TAKEN=self._taken if is_gated else 1,
            UNIT=_UNIT,
            GATED=is_gated,
            CLAMPED=is_gated and clamp is not None,
            WEIGHS=is_gated and experts.weighs_inputs,
            HAS_BIAS=has_bias,
            ALONE=self._is_alone,
            FEW=self._are_few,
            CHOSEN=self._taken,
            EACH=power_of_2(self._taken),
            EXPERTS=len(experts),
            BITS=0 if packing is None else packing.bits,
            FLOATS=packing is not None and packing.is_float,
            ON_CHIP=reads_fp8(x.device),
            SHIFTS=packing is not None and packing.zero is not None,
            GROUP=_ALL if packing is None or packing.has_one_group else packing.group,
            HALF=HALF,
            WIDE=interpreting() and x.dtype is torch.bfloat16,
            ROWS=self._rows,
        )


@cache
def reads_fp8(device: torch.device) -> bool:
    """Return whether instructions of the device turn 8-bit floats into others."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def tile_rows(pairs: int, experts: int, dtype: torch.dtype) -> int:
    """Return the rows of a block."""
    tiles = [tile for tile in TILE_ROWS if dtype is not torch.float32 or tile <= _MOST_FP32]
    return next((tile for tile in tiles if pairs <= tile * experts), tiles[-1])
