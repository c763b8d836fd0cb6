"""Attention over paged blocks, in Triton; reference.py defines it, schedule.py says which pieces run side by side.

A program computes one piece for one head of K: its rows are all queries of the tile, of all heads that share it. Tokens
are looked up one by one, so blocks may have any size and be filled from either end. Unwritten slots are not read: loads
are masked by the request's length.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.common.decoder import Angles, Heads
from alignedserve.kernels.common.int8_kv import MOST_LEVEL, check_dtypes, heads_written, keeps_int8, num_kv_heads
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans, StaticSpans
from alignedserve.kernels.triton.launch import (
    aligned,
    bits_of_bf16,
    from_bits_of_bf16,
    interpreting,
    nearest,
    pdl,
    power_of_2,
    processors,
    tuned,
    wait_for_kernels_before,
    weighed_norm,
)
from alignedserve.kernels.triton.pieces import Partials, piece_at, slots_of, weighed, write_piece
from alignedserve.kernels.triton.schedule import (
    NOTHING,
    AttentionPiece,
    Schedule,
    most_partials,
    most_pieces,
    most_tiles,
    schedule,
    tiles_of,
)

_LEAST_ROWS = 16  # of a matrix product
_CHUNK_ROWS = 64
_LEAST_TOKENS = 32
_PIECES_PER_PROCESSOR = 4  # that run at once
_NO_WINDOW = 2**30
_FIELDS = len(AttentionPiece._fields)
_MOST_OF_WARP = 1024  # numbers of queries that one warp rotates
_MOST_TURNED = 4096  # numbers of queries that a program of attention rotates


def _fits(config: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a tile suits the dtype and the rows.

    In fp32 larger tiles take a minute to compile, and more shared memory. In other dtypes a tile must fit a thread's
    registers: tests/kernels/compile_triton.py shows which do.
    """
    tokens, has_few_warps = config.kwargs["TOKENS"], config.num_warps == 4
    if arguments["query"].dtype is torch.float32:
        return bool(tokens == _LEAST_TOKENS)
    if arguments["ROWS"] == _LEAST_ROWS:
        most = 64 if arguments["IN_INT8"] and has_few_warps else 128
        return tokens <= most and (tokens, has_few_warps, config.num_stages) != (64, True, 5)
    return bool(tokens <= (64 if arguments["IN_INT8"] or has_few_warps else 128))


# The slots of a tile's tokens are loaded first: so 3 stages keep one tile of K and V in flight, and 5 keep two.
@tuned(
    [({"TOKENS": tokens}, (4, 8)) for tokens in (_LEAST_TOKENS, 64, 128)],
    key=["HEAD_DIM", "ROWS", "GROUP"],
    stages=(3, 5),
    fits=_fits,
)
@triton.jit
def _attend(
    query,
    row_stride,
    head_stride,
    cache,
    scales,
    out,
    partial,
    weights,
    counters,
    pieces,
    tables,
    scale,
    softcap,
    window,
    sinks,
    query_norm,
    k_norm,
    eps,
    cos,
    sin,
    angle_stride,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    IN_INT8: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    TOKENS: tl.constexpr,
    NEW: tl.constexpr = False,
    HALF: tl.constexpr = 0,
    NORMED: tl.constexpr = False,
    MOST: tl.constexpr = 0,
    TINY: tl.constexpr = 0.0,
    PDL: tl.constexpr = False,
):
    """Attend for a piece. With NEW each request has one query, and `query` is the row of its heads of queries, K and V,
    as `_rotate_and_write` takes it: every program rotates its own queries, and of each head of K the one whose piece
    has the new token writes its K and V before it reads them.

    The barrier orders the stores of all threads before what any of them reads. No other program reads these places:
    pieces of a request share no token, and a head of K has one program a piece. K and V are read back rather than kept
    in registers: so the loop stays as it is, copies tiles to shared memory ahead of the products, and rounds alike.
    """
    wait_for_kernels_before(PDL)
    first_row, queries, first_position, table, begin, end, part = piece_at(pieces)
    head_of_k = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    own = row // GROUP
    head = head_of_k * GROUP + row % GROUP
    position = first_position + own
    if NEW:
        new_row = first_row.to(tl.int64)
        query += new_row * row_stride
        cos += new_row * angle_stride
        sin += new_row * angle_stride
        q = _turned(query + head * HEAD_DIM, dim, query_norm, eps, cos, sin, HALF, HEAD_DIM, NORMED)
        new_slot = slots_of(first_position, queries > 0, table, tables, BLOCK_SIZE)
        _write_new(
            *(cache, scales, new_slot, BLOCK_SIZE, query, k_norm, eps, cos, sin, end > first_position),
            *(VECTOR, GROUP, HALF, HEAD_DIM, WIDTH, NORMED, IN_INT8, MOST, TINY),
        )
        tl.debug_barrier()
    else:
        of_query = (row[:, None] < queries * GROUP) & (dim[None, :] < HEAD_DIM)
        at = (first_row + own).to(tl.int64)[:, None] * row_stride + head[:, None] * head_stride + dim[None, :]
        q = tl.load(query + at, mask=of_query, other=0.0)
    if WIDE:
        q = q.to(tl.float32)

    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(begin, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = token < end
        slot = slots_of(token, there, table, tables, BLOCK_SIZE) * VECTOR
        vector = slot + head_of_k * HEAD_DIM
        mask = there[:, None] & (dim[None, :] < HEAD_DIM)
        k = tl.load(cache + vector[:, None] + dim[None, :], mask=mask, other=0.0)
        v = tl.load(cache + (vector + BLOCK_SIZE * VECTOR)[:, None] + dim[None, :], mask=mask, other=0.0)
        if IN_INT8:  # levels are exact in every dtype
            of_k = (slot + tl.num_programs(1) * HEAD_DIM) // 2 + head_of_k
            of_v = of_k + BLOCK_SIZE * VECTOR // 2
            scale_of_k = from_bits_of_bf16(tl.load(scales + of_k, mask=there, other=0))
            scale_of_v = from_bits_of_bf16(tl.load(scales + of_v, mask=there, other=0))
            k = k.to(q.dtype)
            v = (v.to(tl.float32) * scale_of_v[:, None]).to(q.dtype)
        elif WIDE:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if IN_INT8:
            scores *= scale_of_k[None, :]
        if CAPPED:
            scores = softcap * _tanh(scores)
        seen = there[None, :] & (token[None, :] <= position[:, None]) & (token[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        share, keep, largest, total = weighed(scores, largest, total)
        acc = acc * keep[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")

    write_piece(
        *(acc, largest, total, out, partial, weights, counters, sinks, pieces, first_row, queries, part),
        *(GROUP, HEAD_DIM, WIDTH, ROWS, WITH_SINKS),
    )


@triton.jit
def _tanh(x):
    small = x * (1.0 - x * x * (0.33333333 - x * x * 0.13333333))  # there the quotient would lose digits
    power = tl.exp2(-2.8853900817779268 * tl.abs(x))
    size = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.05, small, tl.where(x < 0.0, -size, size))


@triton.jit
def _write(cache, slots, k, k_stride, v, v_stride, apart, KV_DIM: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, WIDTH)
    to = cache + tl.load(slots + row) * KV_DIM + dim
    tl.store(to, tl.load(k + row * k_stride + dim, mask=dim < KV_DIM), mask=dim < KV_DIM)
    tl.store(to + apart * KV_DIM, tl.load(v + row * v_stride + dim, mask=dim < KV_DIM), mask=dim < KV_DIM)


@triton.jit
def _turned(first, dim, weight, eps, cos, sin, HALF: tl.constexpr, HEAD_DIM: tl.constexpr, NORMED: tl.constexpr):
    """Return heads [heads, numbers] from these places on, normed and rotated, rounded as tokens.py rounds."""
    there = dim < HEAD_DIM
    other = tl.where(dim < HALF, dim + HALF, tl.where(dim < 2 * HALF, dim - HALF, dim))  # that it turns with
    own = tl.load(first[:, None] + dim[None, :], mask=there[None, :], other=0.0)
    dtype = own.dtype
    own = own.to(tl.float32)
    beside = tl.load(first[:, None] + other[None, :], mask=there[None, :], other=0.0).to(tl.float32)
    if NORMED:
        inverse = (1.0 / tl.sqrt(tl.sum(own * own, 1) / HEAD_DIM + eps))[:, None]
        own = weighed_norm(own, inverse, tl.load(weight + dim, mask=there, other=0.0)[None, :], dtype)
        beside = weighed_norm(beside, inverse, tl.load(weight + other, mask=there, other=0.0)[None, :], dtype)
    if HALF:
        turns = dim < 2 * HALF
        c = tl.load(cos + dim % HALF, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
        s = tl.load(sin + dim % HALF, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
        along = (own * c).to(dtype).to(tl.float32)
        across = (beside * s).to(dtype).to(tl.float32)
        own = tl.where(turns[None, :], along + tl.where(dim < HALF, -1.0, 1.0)[None, :] * across, own)
    return own.to(dtype)


@triton.jit
def _rotate_and_write(
    cache,
    scales,
    slots,
    apart,
    qkv,
    row_stride,
    query,
    query_norm,
    k_norm,
    eps,
    cos,
    sin,
    angle_stride,
    VECTOR: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    IN_INT8: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Rotate a head of K of a row and the queries that share it, and write its K and V."""
    wait_for_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    dim = tl.arange(0, WIDTH)
    there = dim < HEAD_DIM
    cos += row * angle_stride
    sin += row * angle_stride
    own = qkv + row * row_stride
    number = tl.arange(0, QUERIES)
    of_queries = head * GROUP + tl.minimum(number, GROUP - 1)
    turned = _turned(own + of_queries * HEAD_DIM, dim, query_norm, eps, cos, sin, HALF, HEAD_DIM, NORMED)
    to = query + (row * heads * GROUP + of_queries)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to, turned, mask=(number < GROUP)[:, None] & there[None, :])
    _write_new(
        *(cache, scales, tl.load(slots + row), apart, own, k_norm, eps, cos, sin, True),
        *(VECTOR, GROUP, HALF, HEAD_DIM, WIDTH, NORMED, IN_INT8, MOST, TINY),
    )


@triton.jit
def _write_new(
    cache,
    scales,
    slot,
    apart,
    heads_of_row,
    k_norm,
    eps,
    cos,
    sin,
    writes,
    VECTOR: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    IN_INT8: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
):
    """Rotate the program's head of K of a row, and write its K and V to the slot where it `writes`."""
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    dim = tl.arange(0, WIDTH)
    there = dim < HEAD_DIM
    own = heads_of_row + (heads * GROUP + head) * HEAD_DIM
    k = _turned(own + tl.arange(0, 1), dim, k_norm, eps, cos, sin, HALF, HEAD_DIM, NORMED)
    k = tl.reshape(k, (WIDTH,))
    v = tl.load(own + heads * HEAD_DIM + dim, mask=there, other=0.0)
    of_k = slot * VECTOR
    of_v = of_k + apart * VECTOR
    to = head * HEAD_DIM
    if IN_INT8:
        scale = heads * HEAD_DIM
        _write_head(k, cache + of_k + to, scales + (of_k + scale) // 2 + head, dim, there, writes, MOST, TINY)
        _write_head(v, cache + of_v + to, scales + (of_v + scale) // 2 + head, dim, there, writes, MOST, TINY)
    else:
        tl.store(cache + of_k + to + dim, k, mask=there & writes)
        tl.store(cache + of_v + to + dim, v, mask=there & writes)


class TritonAttention:
    @property
    def captures(self) -> bool:
        """Return whether steps can be captured: not where torch replaces this attention and reads tables on the CPU."""
        return isinstance(getattr(self.attend, "__self__", self), TritonAttention)

    def write(self, cache: Tensor, spans: Spans, k: Tensor, v: Tensor) -> None:
        for numbers in (k, v):
            check_dtypes(f"K and V are {k.dtype} and", numbers.dtype, cache)
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        slots = _new_slots(spans, cache.device)
        kv_dim, rows = cache.shape[-1], len(slots)
        if rows and keeps_int8(cache):
            write_int8(cache, slots, k, v, heads_written(cache, k.shape[1]))
        elif rows:
            block_size = cache.shape[1]
            width = power_of_2(kv_dim)
            _write[(rows,)](cache, slots, k, k.stride(0), v, v.stride(0), block_size, KV_DIM=kv_dim, WIDTH=width)

    def rotate_and_write(self, cache: Tensor, spans: Spans, qkv: Tensor, heads: Heads, angles: Angles | None) -> Tensor:
        turning = _turning(qkv, cache, heads, angles)
        rows, group, width = len(qkv), heads.queries // heads.kv, power_of_2(heads.head_dim)
        slots, query = _new_slots(spans, cache.device), qkv.new_empty((rows, heads.queries, heads.head_dim))
        in_int8 = keeps_int8(cache)
        if rows:
            _rotate_and_write[(rows, heads.kv)](
                *(cache, scales_of(cache) if in_int8 else cache, slots, cache.shape[1], qkv, qkv.stride(0), query),
                *turning.arguments,
                VECTOR=cache.shape[-1],
                GROUP=group,
                QUERIES=power_of_2(group),
                HEAD_DIM=heads.head_dim,
                WIDTH=width,
                IN_INT8=in_int8,
                num_warps=1 if power_of_2(group) * width <= _MOST_OF_WARP else 4,
                **turning.constants,
                **pdl(cache.device),
            )
        return query

    def attend_new(
        self, cache: Tensor, spans: Spans, qkv: Tensor, heads: Heads, angles: Angles | None, scoring: Scoring
    ) -> Tensor | None:
        """Return None for steps with prompts, since a chunk reads K and V that other programs would still write.

        Return None, too, where a head of K has more queries than a thread's registers may hold."""
        group = heads.queries // heads.kv
        rows = _rows_of_decodes(group)
        if not spans.only_decodes or rows * power_of_2(heads.head_dim) > _MOST_TURNED:
            return None
        turning = _turning(qkv, cache, heads, angles)
        scoring.check(heads.queries)
        out = qkv.new_empty((len(qkv), heads.queries, heads.head_dim))
        placed = self._placed(spans, cache.device, 1, scoring, decodes=True, kv_heads=heads.kv)
        if placed is not None:
            self._run(placed, qkv.unflatten(1, (-1, heads.head_dim)), cache, out, scoring, rows, group, turning)
        return out

    def attend(self, query: Tensor, cache: Tensor, spans: Spans, scoring: Scoring) -> Tensor:
        check_dtypes("queries are", query.dtype, cache)
        if query.stride(-1) != 1:
            query = query.contiguous()
        _, heads, head_dim = query.shape
        kv_heads = num_kv_heads(cache, head_dim)
        if heads % kv_heads:
            raise ValueError(f"{heads} heads of {head_dim} do not divide among {kv_heads} heads of K")
        scoring.check(heads)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for decodes in (False, True):
            out = self._attend_some(query, cache, spans, out, scoring, decodes)
        return out

    def _attend_some(
        self, query: Tensor, cache: Tensor, spans: Spans, out: Tensor, scoring: Scoring, decodes: bool
    ) -> Tensor:
        """Attend for the spans with one query, or for all others; return `out` with their rows written.

        For all others it may be another tensor: they come first, and the rows of the rest are written behind them."""
        kv_heads = num_kv_heads(cache, query.shape[-1])
        group = query.shape[1] // kv_heads
        rows = _rows_of_decodes(group) if decodes else max(_CHUNK_ROWS, power_of_2(group))
        queries = 1 if decodes else rows // group
        placed = self._placed(spans, cache.device, queries, scoring, decodes, kv_heads)
        if placed is not None:
            self._run(placed, query, cache, out, scoring, rows, group)
        return out

    def _placed(
        self, spans: Spans, device: torch.device, queries: int, scoring: Scoring, decodes: bool, kv_heads: int
    ) -> _Placed | _PlacedAgain | None:
        """Return the schedule on the device, which all layers of a step share."""
        room = _PIECES_PER_PROCESSOR * processors(device) // kv_heads

        def plan() -> Schedule:
            return schedule(tiles_of(spans, queries, scoring, decodes=decodes), room)

        def make() -> _Placed | _PlacedAgain | None:
            if isinstance(spans, StaticSpans):
                tiles = most_tiles(spans.size, queries, scoring.stretch, decodes=decodes)
                return _PlacedAgain(spans, plan, tiles, room, kv_heads) if tiles else None
            planned = plan()
            return _Placed(planned, spans, device, kv_heads) if planned.pieces else None

        reach = (scoring.window, scoring.stretch)
        return spans.kept((device, "pieces", queries, reach, decodes, kv_heads), make)

    def _run(
        self,
        placed: _Placed | _PlacedAgain,
        query: Tensor,
        cache: Tensor,
        out: Tensor,
        scoring: Scoring,
        rows: int,
        group: int,
        new: _Turning | None = None,
    ) -> None:
        """Attend for all pieces; with `new`, `query` has all heads of the rows, whose K and V are not written yet."""
        _, heads, head_dim = out.shape
        kv_heads, width, in_int8 = heads // group, max(16, power_of_2(head_dim)), keeps_int8(cache)
        partials = Partials.empty(placed.num_partials, kv_heads, rows, width, query.device)
        softcap = scoring.softcap or math.log(2)  # scores are exponents of 2
        sinks = partials.weights if scoring.sinks is None else scoring.sinks
        turning = _Turning.none(query, partials.weights) if new is None else new
        _attend[(len(placed.pieces), kv_heads)](
            *(query, query.stride(0), query.stride(1), cache, scales_of(cache) if in_int8 else cache),
            *(out, partials.results, partials.weights, placed.counters),
            *(placed.pieces, placed.blocks, scoring.scale / softcap, softcap / math.log(2)),
            *(scoring.window or _NO_WINDOW, sinks),
            *turning.arguments,
            VECTOR=cache.shape[-1],
            BLOCK_SIZE=cache.shape[1],
            WIDE=interpreting() and query.dtype is torch.bfloat16,
            IN_INT8=in_int8,
            CAPPED=scoring.softcap is not None,
            WITH_SINKS=scoring.sinks is not None,
            GROUP=group,
            HEAD_DIM=head_dim,
            WIDTH=width,
            ROWS=rows,
            NEW=new is not None,
            **turning.constants,
            **pdl(cache.device),
        )


def _rows_of_decodes(group: int) -> int:
    return max(_LEAST_ROWS, power_of_2(group))


class _Turning(NamedTuple):
    """The norms and angles of new tokens, as kernels take them."""

    arguments: tuple[Tensor | float, ...]
    constants: Mapping[str, int | float]

    @classmethod
    def none(cls, of_norm: Tensor, of_angle: Tensor) -> _Turning:
        """Return what is not looked at. Its dtypes are those of other layers, so that the tuner takes the same tiles
        for attention that rotates, and measures nothing for it."""
        return cls((of_norm, of_norm, 0.0, of_angle, of_angle, 0), {"HALF": 0, "NORMED": False, "MOST": 0, "TINY": 0.0})


def _turning(qkv: Tensor, cache: Tensor, heads: Heads, angles: Angles | None) -> _Turning:
    check_dtypes("rows are", qkv.dtype, cache)
    head_dim, kv = heads.head_dim, heads.kv
    fits = qkv.shape[1] == (heads.queries + 2 * kv) * head_dim and qkv.stride(1) == 1
    if not fits or num_kv_heads(cache, head_dim) != kv or heads.queries % kv:
        raise ValueError(f"rows {tuple(qkv.shape)} of {heads} do not fit a cache {tuple(cache.shape)}")
    cos, sin = (qkv.new_empty((0, 0), dtype=torch.float32),) * 2 if angles is None else angles
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        raise ValueError("the cosines and sines of a row must lie side by side")
    norms = (qkv, qkv) if heads.query_norm is None or heads.k_norm is None else (heads.query_norm, heads.k_norm)
    constants = {"HALF": cos.shape[-1], "NORMED": norms[0] is not qkv, "MOST": MOST_LEVEL, "TINY": _TINY}
    return _Turning((*norms, heads.eps, cos, sin, cos.stride(0)), constants)


class _Placed:
    """A schedule on the device, sent in one copy."""

    def __init__(self, planned: Schedule, spans: Spans, device: torch.device, groups: int) -> None:
        pieces = torch.tensor(planned.pieces, dtype=torch.int32).flatten()
        first = aligned(len(pieces))
        end = first + aligned(planned.num_partials * groups)
        parts = pieces, torch.zeros(end - len(pieces), dtype=torch.int32), spans.blocks
        numbers = on_device(torch.cat(parts), device)
        self.pieces, self.counters, self.blocks = numbers[: len(pieces)], numbers[first:end], numbers[end:]
        self.pieces = self.pieces.view(-1, _FIELDS)
        self.num_partials = planned.num_partials


class _PlacedAgain:
    """A schedule for steps that are captured, in memory that stays.

    It has as many pieces and partial results as there can ever be; those that a step does not need compute nothing.
    """

    def __init__(self, spans: StaticSpans, plan: Callable[[], Schedule], tiles: int, room: int, groups: int) -> None:
        self._plan, self.num_partials = plan, most_partials(tiles, room)
        self._section = spans.section(most_pieces(tiles, room) * _FIELDS, torch.int32)
        self.pieces = self._section.device.view(-1, _FIELDS)
        self.counters = torch.zeros(self.num_partials * groups, dtype=torch.int32, device=spans.device)
        self.blocks = spans.device_blocks
        self.refill()
        spans.send()

    def refill(self) -> None:
        planned = self._plan()
        numbers = array("i", chain.from_iterable(planned.pieces))
        numbers.extend(NOTHING * (len(self.pieces) - len(planned.pieces)))
        self._section.host.copy_(torch.frombuffer(numbers, dtype=torch.int32))


_TINY = torch.finfo(torch.float32).tiny


@triton.jit
def _write_head(x, to, scale_to, dim, there, writes, MOST: tl.constexpr, TINY: tl.constexpr):
    x = x.to(tl.float32)
    strange = tl.max(tl.where((x == x) & (tl.abs(x) != float("inf")), 0, 1), 0)
    largest = tl.max(tl.abs(x), 0) / MOST
    kept = bits_of_bf16(tl.where(strange == 0, largest, float("nan")))
    kept = tl.where(from_bits_of_bf16(kept) < TINY, 0, kept).to(tl.int16)
    scale = from_bits_of_bf16(kept)
    inverse = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    level = nearest(tl.minimum(tl.maximum(x * inverse, -MOST), MOST))
    tl.store(to + dim, tl.where(strange == 0, level, 0.0).to(tl.int8), mask=there & writes)
    tl.store(scale_to, kept, mask=writes)


@triton.jit
def _write_int8(
    cache,
    scales,
    slots,
    k,
    k_stride,
    v,
    v_stride,
    apart,
    VECTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, WIDTH)
    there = dim < HEAD_DIM
    of_k = tl.load(slots + row) * VECTOR
    of_v = of_k + apart * VECTOR
    levels = head * HEAD_DIM
    behind = tl.num_programs(1) * HEAD_DIM
    x = tl.load(k + row * k_stride + levels + dim, mask=there, other=0.0)
    _write_head(x, cache + of_k + levels, scales + (of_k + behind) // 2 + head, dim, there, True, MOST, TINY)
    x = tl.load(v + row * v_stride + levels + dim, mask=there, other=0.0)
    _write_head(x, cache + of_v + levels, scales + (of_v + behind) // 2 + head, dim, there, True, MOST, TINY)


def write_int8(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor, heads: int) -> None:
    """Put K and V, whose numbers lie side by side, into these slots of a layer's cache."""
    head_dim = k.shape[1] // heads
    _write_int8[(len(slots), heads)](
        *(cache, scales_of(cache), slots, k, k.stride(0), v, v.stride(0), cache.shape[1]),
        VECTOR=cache.shape[-1],
        HEAD_DIM=head_dim,
        WIDTH=power_of_2(head_dim),
        MOST=MOST_LEVEL,
        TINY=_TINY,
    )


def _new_slots(spans: Spans, device: torch.device) -> Tensor:
    return spans.kept((device, "slots"), lambda: on_device(spans.new_slots, device))


def scales_of(cache: Tensor) -> Tensor:
    """Return the cache as the bits of its scales: two bytes each, at even places."""
    return cache.view(torch.int16)
