"""What all attention in Triton shares: a program reads its piece, finds tokens in blocks, weighs them, and writes.

schedule.py cuts attention into pieces. A piece alone writes its rows of the output. Pieces that share rows write
partial results and, as a power of two, how much each weighs; `merge` adds these up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import triton
import triton.language as tl

OF_2 = tl.constexpr(1 / math.log(2))  # of a power of e: that of 2


@triton.jit
def piece_at(pieces):
    """Return the program's piece: its first row, queries, first position, table, begin, end and part."""
    piece = pieces + tl.program_id(0) * 8
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
    part,
    first_row,
    queries,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the rows of a piece: to the output if it is alone, else to its part of the partial results."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    sum_of_row = tl.where(total == 0.0, 1.0, total)
    result = acc / sum_of_row[:, None]
    if part < 0:
        _write_rows(result, out, first_row, queries, GROUP, HEAD_DIM, WIDTH, ROWS)
    else:
        row_of = (part * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * ROWS + row
        tl.store(partial + row_of[:, None] * WIDTH + dim[None, :], result)
        tl.store(weights + row_of, tl.where(total == 0.0, -float("inf"), largest + tl.log2(sum_of_row)))


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


@triton.jit
def merge(
    partial,
    weights,
    out,
    merges,
    sinks,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    merged = merges + tl.program_id(0) * 4
    first_row = tl.load(merged)
    queries = tl.load(merged + 1)
    first = tl.load(merged + 2)
    count = tl.load(merged + 3)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for number in range(count):
        row_of = ((first + number) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * ROWS + row
        weight = tl.load(weights + row_of)
        now = tl.maximum(largest, weight)
        base = tl.where(now == -float("inf"), 0.0, now)
        keep = tl.exp2(largest - base)
        share = tl.exp2(weight - base)
        acc = acc * keep[:, None] + tl.load(partial + row_of[:, None] * WIDTH + dim[None, :]) * share[:, None]
        total = total * keep + share
        largest = now
    if WITH_SINKS:
        head = tl.program_id(1) * GROUP + row % GROUP
        total += tl.exp2(tl.load(sinks + head) * OF_2 - largest)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    _write_rows(result, out, first_row, queries, GROUP, HEAD_DIM, WIDTH, ROWS)


@dataclass(frozen=True)
class Partials:
    """Partial results of pieces that share rows."""

    results: Tensor  # [parts, groups of heads, rows, width]
    weights: Tensor  # [parts, groups of heads, rows]

    @classmethod
    def empty(cls, parts: int, groups: int, rows: int, width: int, device: torch.device) -> Partials:
        results = torch.empty((parts, groups, rows, width), dtype=torch.float32, device=device)
        return cls(results, results.new_empty(results.shape[:3]))
