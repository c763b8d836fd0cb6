"""Adds to a linear layer what its adapters change, y += B (A x), in Triton: two kernels for all adapters of a step.

A program of the first sums up A x of some rows of one adapter, a program of the second adds a panel of B to them. Which
rows and which adapter a program has is in a table that the CPU makes once for each step; where A and B of each adapter
lie, in a table of addresses for each layer.

    tiles    [tiles, 3]            group, its first row in `rows`, how many rows
    layers   [layers, groups, 18]  address of A, ranks, parts; of each part: first rank, ranks, first out, outs, B
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.common.adapters import MOST_PARTS, PANEL, AdapterWeights, LayerAdapter, StepAdapters
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.triton.launch import interpreting, power_of_2

TILE_ROWS = 16
_INPUTS = 64  # of x and A at a time
_OF_PART, _BEFORE_PARTS = 5, 3
FIELDS = _BEFORE_PARTS + _OF_PART * MOST_PARTS


@triton.jit
def _sum_ranks(
    x,
    x_row,
    layer,
    tiles,
    rows,
    sums,
    inputs,
    FIELDS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write A x of a tile of rows, [rows of all groups, RANKS]; beyond an adapter's ranks they are 0."""
    tile = tiles + tl.program_id(0) * 3
    own = layer + tl.load(tile) * FIELDS
    ranks = tl.load(own + 1)
    if ranks > 0:
        a = tl.load(own).to(tl.pointer_type(x.dtype.element_ty))
        at, count = tl.load(tile + 1), tl.load(tile + 2)
        place, rank = tl.arange(0, ROWS), tl.arange(0, RANKS)
        there, has_rank = place < count, rank < ranks
        row = tl.load(rows + at + place, mask=there, other=0).to(tl.int64)
        acc = tl.zeros((ROWS, RANKS), tl.float32)
        for first in range(0, inputs, INPUTS):
            column = first + tl.arange(0, INPUTS)
            in_x = column < inputs
            left = tl.load(x + row[:, None] * x_row + column[None, :], mask=there[:, None] & in_x[None, :], other=0.0)
            right = tl.load(
                a + rank[None, :] * inputs + column[:, None], mask=has_rank[None, :] & in_x[:, None], other=0.0
            )
            if WIDE:
                left, right = left.to(tl.float32), right.to(tl.float32)
            acc = tl.dot(left, right, acc, input_precision="ieee")
        tl.store(sums + (at + place)[:, None] * RANKS + rank[None, :], acc, mask=there[:, None])


@triton.jit
def _add_panels(
    out,
    out_row,
    layer,
    tiles,
    rows,
    sums,
    FIELDS: tl.constexpr,
    PART: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    PANEL: tl.constexpr,
    PAIR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add a panel of one part's outputs to a tile of rows."""
    tile = tiles + tl.program_id(0) * 3
    own = layer + tl.load(tile) * FIELDS + PART
    first_rank, ranks = tl.load(own), tl.load(own + 1)
    first_out, outs = tl.load(own + 2), tl.load(own + 3)
    panel = tl.program_id(1)
    if panel * PANEL < outs:
        b = (
            tl.load(own + 4).to(tl.pointer_type(out.dtype.element_ty))
            + panel.to(tl.int64) * ((ranks + PAIR - 1) // PAIR * PAIR) * PANEL
        )
        at, count = tl.load(tile + 1), tl.load(tile + 2)
        place, rank, column = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, PANEL)
        there, has_rank = place < count, rank < ranks
        row = tl.load(rows + at + place, mask=there, other=0).to(tl.int64)
        left = sums + (at + place)[:, None] * ALL_RANKS + first_rank + rank[None, :]
        left = tl.load(left, mask=there[:, None] & has_rank[None, :], other=0.0)
        within = (rank // PAIR * PAIR)[:, None] * PANEL + column[None, :] * PAIR + (rank % PAIR)[:, None]
        right = tl.load(b + within, mask=has_rank[:, None], other=0.0)
        if WIDE:
            right = right.to(tl.float32)
        made = tl.dot(left.to(right.dtype), right, input_precision="ieee")
        to = out + row[:, None] * out_row + first_out + panel * PANEL + column[None, :]
        mask = there[:, None] & (panel * PANEL + column < outs)[None, :]
        made += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, made.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class _Tables:
    """A step's tables on the device, and for each layer the sizes that its launches need."""

    tiles: Tensor
    rows: Tensor
    layers: Tensor
    ranks: tuple[int, ...]  # of each layer, the most of all adapters: a power of 2, or 0
    parts: tuple[tuple[tuple[int, int], ...], ...]  # of each layer and part: the most ranks, and the most outputs

    @classmethod
    def from_step(cls, step: StepAdapters, device: torch.device) -> _Tables:
        tiles, first = [], 0
        for number, group in enumerate(step.groups):
            count = len(group.rows)
            tiles += [(number, first + at, min(TILE_ROWS, count - at)) for at in range(0, count, TILE_ROWS)]
            first += count
        weights = [group.weights for group in step.groups]
        by_layer = [*zip(*(own.layers for own in weights), strict=True)]
        return cls(
            torch.tensor(tiles, dtype=torch.int32).to(device),
            torch.cat([group.rows for group in step.groups]).to(device),
            torch.stack([_addresses(own) for own in weights], dim=1).to(device),
            tuple(_filled(max((0 if own is None else len(own.a)) for own in layer)) for layer in by_layer),
            tuple(tuple(_largest(layer, part) for part in range(MOST_PARTS)) for layer in by_layer),
        )


class TritonAdapters(Reference):
    def adapt(self, step: StepAdapters, layer: int, x: Tensor, out: Tensor) -> None:
        step.check(x)
        tables = _tables_of(step, x.device)
        ranks, wide = tables.ranks[layer], interpreting() or x.dtype is torch.float32
        if not ranks:
            return
        sums = torch.empty((len(tables.rows), ranks), dtype=torch.float32, device=x.device)
        own, tiles = tables.layers[layer], len(tables.tiles)
        x = x if x.stride(1) == 1 else x.contiguous()
        _sum_ranks[(tiles,)](
            *(x, x.stride(0), own, tables.tiles, tables.rows, sums, x.shape[1]),
            FIELDS=FIELDS,
            RANKS=ranks,
            ROWS=TILE_ROWS,
            INPUTS=_INPUTS,
            WIDE=wide,
        )
        for part, (most_ranks, most_outs) in enumerate(tables.parts[layer]):
            if most_ranks:
                _add_panels[(tiles, -(-most_outs // PANEL))](
                    *(out, out.stride(0), own, tables.tiles, tables.rows, sums),
                    FIELDS=FIELDS,
                    PART=_BEFORE_PARTS + _OF_PART * part,
                    ALL_RANKS=ranks,
                    RANKS=most_ranks,
                    ROWS=TILE_ROWS,
                    PANEL=PANEL,
                    PAIR=2 if x.dtype is torch.bfloat16 else 1,
                    WIDE=wide,
                )


def _tables_of(step: StepAdapters, device: torch.device) -> _Tables:
    if not isinstance(step.tables, _Tables):
        step.tables = _Tables.from_step(step, device)
    return step.tables


def _addresses(weights: AdapterWeights) -> Tensor:
    """Return the rows of an adapter in the table of layers, made once for each adapter."""
    if weights.table is None:
        weights.table = torch.tensor([_fields(layer) for layer in weights.layers], dtype=torch.long)
    return weights.table


def _fields(layer: LayerAdapter | None) -> list[int]:
    if layer is None:
        return [0] * FIELDS
    parts = [(p.first_rank, p.ranks, p.first_out, p.outs, p.b.data_ptr()) for p in layer.parts]
    parts += [(0, 0, 0, 0, 0)] * (MOST_PARTS - len(parts))
    return [layer.a.data_ptr(), len(layer.a), len(layer.parts), *(field for part in parts for field in part)]


def _largest(layer: tuple[LayerAdapter | None, ...], part: int) -> tuple[int, int]:
    """Return the most ranks, as `tl.dot` takes them, and the most outputs that any adapter's part has."""
    parts = [own.parts[part] for own in layer if own is not None and part < len(own.parts)]
    return _filled(max((own.ranks for own in parts), default=0)), max((own.outs for own in parts), default=0)


def _filled(ranks: int) -> int:
    return max(16, power_of_2(ranks)) if ranks else 0
