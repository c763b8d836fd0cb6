"""Adds to a linear layer what its adapters change, y += B (A x), in Triton: two kernels for all adapters of a step.

Programs of the first sum up A x, some ranks of a tile of rows each; those of the second add a panel of B to them. All
rows of a tile have one adapter. Which these are is in a table that the CPU makes once for each step; where A and B of a
layer lie, in a table that each adapter has. So a captured step may have any adapters of any rank: the kernels find on
the device how many tiles and ranks there are, and a program without work ends at once.

    tiles    count, then of each tile: address of its adapter's table, its rows (-1: none)
    table    [layers, 18]: address of A, ranks, parts; of each part: first rank, ranks, first out, outs, B
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.common.adapters import (
    MOST_PARTS,
    PANEL,
    AdapterWeights,
    LayerAdapter,
    StaticAdapters,
    StepAdapters,
)
from alignedserve.kernels.common.placing import on_device, put
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.triton.launch import interpreting

TILE_ROWS, TILE_RANKS = 16, 16
_INPUTS = 128  # of x and A at a time
_MOST_RANKS = 256 * MOST_PARTS  # of a layer (alignedserve/architectures/families/lora.py)
_TILES_AT_ONCE, _PROGRAMS = 64, 1024  # at most: each program takes several tiles where there are more
_OF_PART, _BEFORE_PARTS = 5, 3
FIELDS = _BEFORE_PARTS + _OF_PART * MOST_PARTS


@triton.jit(do_not_specialize=["layer"])
def _sum_ranks(
    x,
    x_row,
    layer,
    tiles,
    sums,
    inputs,
    FIELDS: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write some ranks of A x, [rows of x, ALL_RANKS]; what lies beyond an adapter's ranks is not written."""
    first = tl.program_id(1) * RANKS
    place, rank = tl.arange(0, ROWS), first + tl.arange(0, RANKS)
    for number in range(tl.program_id(0), tl.load(tiles).to(tl.int32), tl.num_programs(0)):
        tile = tiles + 1 + number * (1 + ROWS)
        own = tl.load(tile).to(tl.pointer_type(tl.int64)) + layer * FIELDS
        ranks = tl.load(own + 1).to(tl.int32)
        if first < ranks:
            a = tl.multiple_of(tl.load(own).to(tl.pointer_type(x.dtype.element_ty)), 16)
            row = tl.load(tile + 1 + place)
            there, has_rank = row >= 0, rank < ranks
            acc = tl.zeros((ROWS, RANKS), tl.float32)
            for begin in range(0, inputs, INPUTS):
                column = begin + tl.arange(0, INPUTS)
                in_x = column < inputs
                left = tl.load(
                    x + row[:, None] * x_row + column[None, :], mask=there[:, None] & in_x[None, :], other=0.0
                )
                right = tl.load(
                    a + rank[None, :] * inputs + column[:, None], mask=has_rank[None, :] & in_x[:, None], other=0.0
                )
                if WIDE:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                acc = tl.dot(left, right, acc, input_precision="ieee")
            tl.store(sums + row[:, None] * ALL_RANKS + rank[None, :], acc, mask=there[:, None] & has_rank[None, :])


@triton.jit(do_not_specialize=["layer"])
def _add_panels(
    out,
    out_row,
    layer,
    tiles,
    sums,
    FIELDS: tl.constexpr,
    BEFORE_PARTS: tl.constexpr,
    OF_PART: tl.constexpr,
    PARTS: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    PANEL: tl.constexpr,
    PAIR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add a panel of outputs to tiles of rows; the panels of all parts are counted on end."""
    place, column = tl.arange(0, ROWS), tl.arange(0, PANEL)
    for number in range(tl.program_id(0), tl.load(tiles).to(tl.int32), tl.num_programs(0)):
        tile = tiles + 1 + number * (1 + ROWS)
        own = tl.load(tile).to(tl.pointer_type(tl.int64)) + layer * FIELDS
        panel, part = tl.program_id(1), BEFORE_PARTS
        for _ in tl.static_range(PARTS - 1):
            panels = (tl.load(own + part + 3).to(tl.int32) + PANEL - 1) // PANEL
            is_here = panel < panels
            part, panel = tl.where(is_here, part, part + OF_PART), tl.where(is_here, panel, panel - panels)
        outs = tl.load(own + part + 3).to(tl.int32)
        if panel * PANEL < outs:
            first_rank, ranks = tl.load(own + part).to(tl.int32), tl.load(own + part + 1).to(tl.int32)
            b = tl.load(own + part + 4).to(tl.pointer_type(out.dtype.element_ty))
            b += panel.to(tl.int64) * ((ranks + PAIR - 1) // PAIR * PAIR) * PANEL
            row = tl.load(tile + 1 + place)
            there = row >= 0
            made = tl.zeros((ROWS, PANEL), tl.float32)
            for begin in range(0, ranks, RANKS):
                rank = begin + tl.arange(0, RANKS)
                has_rank = rank < ranks
                left = sums + row[:, None] * ALL_RANKS + first_rank + rank[None, :]
                left = tl.load(left, mask=there[:, None] & has_rank[None, :], other=0.0)
                within = (rank // PAIR * PAIR)[:, None] * PANEL + column[None, :] * PAIR + (rank % PAIR)[:, None]
                right = tl.load(b + within, mask=has_rank[:, None], other=0.0)
                if WIDE:
                    right = right.to(tl.float32)
                made = tl.dot(left.to(right.dtype), right, made, input_precision="ieee")
            to = out + row[:, None] * out_row + tl.load(own + part + 2) + panel * PANEL + column[None, :]
            mask = there[:, None] & (panel * PANEL + column < outs)[None, :]
            made += tl.load(to, mask=mask, other=0.0).to(tl.float32)
            tl.store(to, made.to(out.dtype.element_ty), mask=mask)


class _Tiles:
    """A step's tiles on the device; of steps that are captured in memory that stays, with a tile for each row."""

    def __init__(self, step: StepAdapters, device: torch.device) -> None:
        self._step, room = step, len(made := _tiles_of(step, device))
        if isinstance(step, StaticAdapters):
            room = 1 + step.rows * (1 + TILE_ROWS)
        self.numbers = torch.empty(room, dtype=torch.long, device=device)
        put(self.numbers[: len(made)], made)

    def refill(self) -> None:
        made = _tiles_of(self._step, self.numbers.device)
        put(self.numbers[: len(made)], made)


class TritonAdapters(Reference):
    @property
    def captures_adapters(self) -> bool:
        return isinstance(getattr(self.adapt, "__self__", self), TritonAdapters)

    def adapt(self, step: StepAdapters, layer: int, x: Tensor, out: Tensor) -> None:
        step.check(x)
        if not isinstance(step.tables, _Tiles):
            step.tables = _Tiles(step, x.device)
        tiles, rows, wide = step.tables.numbers, len(x), interpreting() or x.dtype is torch.float32
        sums = torch.empty((rows, _MOST_RANKS), dtype=torch.float32, device=x.device)
        x = x if x.stride(1) == 1 else x.contiguous()
        _sum_ranks[(min(rows, _TILES_AT_ONCE), _MOST_RANKS // TILE_RANKS)](
            *(x, x.stride(0), layer, tiles, sums, x.shape[1]),
            FIELDS=FIELDS,
            ALL_RANKS=_MOST_RANKS,
            RANKS=TILE_RANKS,
            ROWS=TILE_ROWS,
            INPUTS=_INPUTS,
            WIDE=wide,
        )
        panels = out.shape[1] // PANEL + MOST_PARTS
        _add_panels[(min(rows, -(-_PROGRAMS // panels)), panels)](
            *(out, out.stride(0), layer, tiles, sums),
            FIELDS=FIELDS,
            BEFORE_PARTS=_BEFORE_PARTS,
            OF_PART=_OF_PART,
            PARTS=MOST_PARTS,
            ALL_RANKS=_MOST_RANKS,
            RANKS=TILE_RANKS,
            ROWS=TILE_ROWS,
            PANEL=PANEL,
            PAIR=2 if x.dtype is torch.bfloat16 else 1,
            WIDE=wide,
        )


def _tiles_of(step: StepAdapters, device: torch.device) -> Tensor:
    numbers = array("q", (0,))
    for group in step.groups:
        address, rows = _table_of(group.weights, device).data_ptr(), group.rows.tolist()
        for first in range(0, len(rows), TILE_ROWS):
            own = rows[first : first + TILE_ROWS]
            numbers.extend((address, *own, *(-1,) * (TILE_ROWS - len(own))))
    numbers[0] = len(numbers) // (1 + TILE_ROWS)
    return torch.frombuffer(numbers, dtype=torch.long)


def _table_of(weights: AdapterWeights, device: torch.device) -> Tensor:
    """Return an adapter's table, made once for each adapter."""
    if weights.table is None:
        weights.table = on_device(torch.tensor([_fields(layer) for layer in weights.layers], dtype=torch.long), device)
    return weights.table


def _fields(layer: LayerAdapter | None) -> list[int]:
    if layer is None:
        return [0] * FIELDS
    parts = [(p.first_rank, p.ranks, p.first_out, p.outs, p.b.data_ptr()) for p in layer.parts]
    parts += [(0, 0, 0, 0, 0)] * (MOST_PARTS - len(parts))
    return [layer.a.data_ptr(), len(layer.a), len(layer.parts), *(field for part in parts for field in part)]
