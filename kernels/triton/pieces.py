"""What all attention in Triton shares: a program reads its piece, finds tokens in blocks, weighs them, and writes.

schedule.py cuts attention into pieces. A piece alone writes its rows of the output. Pieces that share rows write
partial results and, as a power of two, how much each weighs; the last of them to be done adds these up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.triton.schedule import AttentionPiece

OF_2 = tl.constexpr(1 / math.log(2))  # of a power of e: that of 2
FIELDS = tl.constexpr(len(AttentionPiece._fields))


@triton.jit
def piece_at(pieces):
    """Return the program's piece: its first row, queries, first position, table, begin, end and part."""
    piece = pieces + tl.program_id(0) * FIELDS
    first_row = tl.load(piece)
    queries = tl.load(piece + 1)
    first_position = tl.load(piece + 2)
    table = tl.load(piece + 3)
    begin = tl.load(piece + 4)
    end = tl.load(piece + 5)
    part = tl.load(piece + 6)
    return first_row, queries, first_position, table, begin, end, part


@triton.jit
def slots_of(token, there, table, tables, BLOCK_SIZE: tl.constexpr):
    """Return the places of tokens among all vectors of the cache, that of K; ~b is block b from its right end."""
    block = tl.load(tables + table + token // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    offset = token % BLOCK_SIZE
    return tl.where(block < 0, (1 - 2 * (block + 1)) * BLOCK_SIZE - 1 - offset, 2 * block * BLOCK_SIZE + offset)


@triton.jit
def weighed(scores, largest, total):
    """Return the weight of each score, the factor of what was summed before, and the new largest score and total."""
    now = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(now == -float("inf"), 0.0, now)  # for a row that has seen no token yet
    share = tl.exp2(scores - base[:, None])
    keep = tl.exp2(largest - base)
    return share, keep, now, total * keep + tl.sum(share, 1)


@triton.jit
def write_piece(
    acc,
    largest,
    total,
    out,
    partial,
    weights,
    counters,
    sinks,
    pieces,
    first_row,
    queries,
    part,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    """Write the rows of a piece: to the output if it is alone, else to its part of the partial results; the piece of a
    tile that is done last adds the parts up, in their order.

    No part is read before it is there: the barrier orders the stores of all threads before the addition of one of them,
    whose release at the GPU's scope orders them before what any program does that sees the addition. The program that
    sees all additions has acquired them, directly or through the programs between, and all its threads read behind the
    barrier that hands them the count. It leaves the counter at zero: the kernel after this one reads nothing before
    this one has ended, so the same memory serves all layers, and graphs that are replayed.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    if part < 0:
        if WITH_SINKS:
            total = _with_sinks(total, largest, sinks, row, GROUP)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        _write_rows(result, out, first_row, queries, GROUP, HEAD_DIM, WIDTH, ROWS)
    else:
        piece = pieces + tl.program_id(0) * FIELDS
        first = tl.load(piece + 7)
        splits = tl.load(piece + 8)
        used = row < queries * GROUP
        sum_of_row = tl.where(total == 0.0, 1.0, total)
        row_of = _row_of(part, ROWS)
        tl.store(partial + row_of[:, None] * WIDTH + dim[None, :], acc / sum_of_row[:, None], mask=used[:, None])
        tl.store(weights + row_of, tl.where(total == 0.0, -float("inf"), largest + tl.log2(sum_of_row)), mask=used)
        counter = counters + first * tl.num_programs(1) + tl.program_id(1)
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
            largest = tl.full((ROWS,), -float("inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, WIDTH), tl.float32)
            for number in tl.range(first, first + splits, loop_unroll_factor=4 if ROWS * WIDTH <= 2048 else 1):
                row_of = _row_of(number, ROWS)
                weight = tl.load(weights + row_of, mask=used, other=-float("inf"))
                its = tl.load(partial + row_of[:, None] * WIDTH + dim[None, :], mask=used[:, None], other=0.0)
                now = tl.maximum(largest, weight)
                base = tl.where(now == -float("inf"), 0.0, now)
                keep = tl.exp2(largest - base)
                share = tl.exp2(weight - base)
                acc = acc * keep[:, None] + its * share[:, None]
                total = total * keep + share
                largest = now
            if WITH_SINKS:
                total = _with_sinks(total, largest, sinks, row, GROUP)
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            _write_rows(result, out, first_row, queries, GROUP, HEAD_DIM, WIDTH, ROWS)
            tl.store(counter, 0)


@triton.jit
def _row_of(part, ROWS: tl.constexpr):
    """Return the places of a part's rows among those of all parts and groups of heads."""
    return (part * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def _with_sinks(total, largest, sinks, row, GROUP: tl.constexpr):
    return total + tl.exp2(tl.load(sinks + tl.program_id(1) * GROUP + row % GROUP) * OF_2 - largest)


@triton.jit
def _write_rows(
    result,
    out,
    first_row,
    queries,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    head = tl.program_id(1) * GROUP + row % GROUP
    heads = tl.num_programs(1) * GROUP
    to = ((first_row + row // GROUP).to(tl.int64)[:, None] * heads + head[:, None]) * HEAD_DIM + dim[None, :]
    mask = (row[:, None] < queries * GROUP) & (dim[None, :] < HEAD_DIM)
    tl.store(out + to, result.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Partials:
    """Partial results of pieces that share rows."""

    results: Tensor  # [parts, groups of heads, rows, width]
    weights: Tensor  # [parts, groups of heads, rows]

    @classmethod
    def empty(cls, parts: int, groups: int, rows: int, width: int, device: torch.device) -> Partials:
        results = torch.empty((parts, groups, rows, width), dtype=torch.float32, device=device)
        return cls(results, results.new_empty(results.shape[:3]))
