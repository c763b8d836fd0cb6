"""Attention to compressed vectors, in Triton; reference.py defines it, pieces.py says which pieces run side by side.

A program computes one piece for some of the heads: its rows are all queries of the tile, of these heads. A token's
vector is read once, and is K and V at the same time. Its numbers are cut in two: those that are V too, and the rest;
either part may begin in the place of K and go on in the place of V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans
from alignedserve.kernels.triton.attention import TritonAttention
from alignedserve.kernels.triton.launch import interpreting, power_of_2, tuned
from alignedserve.kernels.triton.pieces import Partials, piece_at, slots_of, weighed, write_piece

_LEAST = 16  # the least size of a matrix product
_CHUNK_ROWS = 32  # more take more registers than there are
_MOST_OF_FEW_WARPS = 512  # scores of a tile


def _fits(config: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a tile suits the dtype, for in fp32 a token takes twice the shared memory, and a thread's
    registers."""
    tokens = config.kwargs["TOKENS"]
    if arguments["query"].dtype is torch.float32:
        return bool(tokens == _LEAST)
    return bool(tokens > _LEAST and (config.num_warps > 4 or tokens * arguments["ROWS"] <= _MOST_OF_FEW_WARPS))


@tuned(
    [({"TOKENS": tokens}, (4, 8)) for tokens in (_LEAST, 32, 64)],
    key=["RANK", "SIZE", "ROWS", "GROUP"],
    stages=(1, 2),
    fits=_fits,
)
@triton.jit
def _attend_latent(
    query,
    row_stride,
    head_stride,
    cache,
    out,
    partial,
    weights,
    counters,
    pieces,
    tables,
    scale,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    first_row, queries, first_position, table, begin, end, part = piece_at(pieces)
    row = tl.arange(0, ROWS)
    own = row // GROUP
    head = tl.program_id(1) * GROUP + row % GROUP
    position = first_position + own
    is_row = row < queries * GROUP
    dim = tl.arange(0, WIDTH)
    rest = RANK + tl.arange(0, REST)
    at = query + (first_row + own).to(tl.int64)[:, None] * row_stride + head[:, None] * head_stride
    q = tl.load(at + dim[None, :], mask=is_row[:, None] & (dim[None, :] < RANK), other=0.0)
    q_rest = tl.load(at + rest[None, :], mask=is_row[:, None] & (rest[None, :] < SIZE), other=0.0)
    if WIDE:
        q = q.to(tl.float32)
        q_rest = q_rest.to(tl.float32)
    place = dim + tl.where(dim >= HALF, (BLOCK_SIZE - 1) * HALF, 0)
    place_of_rest = rest + tl.where(rest >= HALF, (BLOCK_SIZE - 1) * HALF, 0)

    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(begin, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = token < end
        vector = cache + (slots_of(token, there, table, tables, BLOCK_SIZE) * HALF)[:, None]
        kept = tl.load(vector + place[None, :], mask=there[:, None] & (dim[None, :] < RANK), other=0.0)
        kept_rest = tl.load(vector + place_of_rest[None, :], mask=there[:, None] & (rest[None, :] < SIZE), other=0.0)
        if WIDE:
            kept = kept.to(tl.float32)
            kept_rest = kept_rest.to(tl.float32)
        scores = tl.dot(q, tl.trans(kept), input_precision="ieee")
        scores += tl.dot(q_rest, tl.trans(kept_rest), input_precision="ieee")
        seen = there[None, :] & (token[None, :] <= position[:, None])
        scores = tl.where(seen, scores * scale, -float("inf"))
        share, keep, largest, total = weighed(scores, largest, total)
        acc = acc * keep[:, None] + tl.dot(share.to(kept.dtype), kept, input_precision="ieee")

    write_piece(
        *(acc, largest, total, out, partial, weights, counters, weights, pieces, first_row, queries, part),
        *(GROUP, RANK, WIDTH, ROWS, False),
    )


class TritonLatentAttention(TritonAttention):
    @property
    def captures_latent(self) -> bool:
        """Return whether steps can be captured: not where torch replaces this attention."""
        return isinstance(getattr(self.attend_latent, "__self__", self), TritonLatentAttention)

    def attend_latent(self, query: Tensor, cache: Tensor, spans: Spans, scale: float, rank: int) -> Tensor:
        if query.dtype is not cache.dtype:
            raise TypeError(f"queries are {query.dtype}, the cache {cache.dtype}: they must be the same")
        rows, heads, size = query.shape
        if size != 2 * cache.shape[-1] or not 0 < rank <= size:
            raise ValueError(f"queries of {size} with V of {rank} do not fit halves of {cache.shape[-1]}")
        if query.stride(-1) != 1:
            query = query.contiguous()
        out = query.new_empty((rows, heads, rank))
        for decodes in (True, False):
            self._attend_latent_some(query, cache, spans, out, scale, decodes)
        return out

    def _attend_latent_some(
        self, query: Tensor, cache: Tensor, spans: Spans, out: Tensor, scale: float, decodes: bool
    ) -> None:
        """Attend for the spans with one query, or for all others, and write their rows of `out`."""
        heads, size, rank = query.shape[1], query.shape[2], out.shape[2]
        rows = _LEAST if decodes or query.dtype is torch.float32 else _CHUNK_ROWS
        group = max(count for count in range(1, _LEAST + 1) if heads % count == 0)
        placed = self._placed(
            spans, cache.device, 1 if decodes else rows // group, Scoring(scale), decodes, heads // group
        )
        if placed is None:
            return
        width = max(_LEAST, power_of_2(rank))
        partials = Partials.empty(placed.num_partials, heads // group, rows, width, query.device)
        _attend_latent[(len(placed.pieces), heads // group)](
            *(query, query.stride(0), query.stride(1), cache, out, partials.results, partials.weights),
            *(placed.counters, placed.pieces, placed.blocks, scale / math.log(2)),
            HALF=cache.shape[-1],
            BLOCK_SIZE=cache.shape[1],
            GROUP=group,
            RANK=rank,
            SIZE=size,
            WIDTH=width,
            REST=max(_LEAST, power_of_2(max(1, size - rank))),
            ROWS=rows,
            WIDE=interpreting() and query.dtype is torch.bfloat16,
        )
