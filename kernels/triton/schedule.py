"""Cut attention into pieces of about equal length, however long a request is, which a GPU computes side by side.

A tile is a run of queries of one request. The tokens that it attends to are cut into splits of about equal length, as
many as keep all processors of the GPU busy, and the last one to be done merges their results. A short tile stays whole,
and writes its result itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans, StepSize

LEAST_SPLIT = 64  # tokens, where few requests leave processors idle; many requests make longer splits by themselves


class Tile(NamedTuple):
    row: int  # of its first query
    queries: int
    position: int  # of its first query in the request
    start: int  # of the request's blocks in the table
    begin: int  # of the tokens that it attends to
    end: int


class AttentionPiece(NamedTuple):
    """A piece as the kernel reads it: nine numbers a row."""

    row: int
    queries: int
    position: int
    start: int
    begin: int
    end: int
    partial: int  # where its partial result goes; -1 where the piece is the whole tile
    first: int = 0  # partial result of the tile: they lie one after the other
    splits: int = 1  # of the tile


@dataclass(frozen=True)
class Schedule:
    pieces: tuple[AttentionPiece, ...]
    num_partials: int


def tiles_of(spans: Spans, queries: int, scoring: Scoring, *, decodes: bool) -> Iterator[Tile]:
    """Yield tiles of at most `queries` queries each, of the spans with one query or of all others.

    All queries of a tile lie in one stretch, so that the kernel knows of windows alone.
    """
    rows, tokens, starts = spans.rows.tolist(), spans.tokens.tolist(), spans.starts.tolist()
    for span, length in enumerate(tokens):
        count = rows[span + 1] - rows[span]
        if (count == 1) != decodes:
            continue
        start = length - count
        for position, end in _cut_at_stretches(start, length, queries, scoring.stretch):
            begin = scoring.first_seen(position)
            yield Tile(rows[span] + position - start, end - position, position, starts[span], begin, end)


def _cut_at_stretches(start: int, end: int, most: int, stretch: int | None) -> Iterator[tuple[int, int]]:
    """Yield parts of at most `most` positions; none reaches over the end of a stretch."""
    while start < end:
        left = most if stretch is None else min(most, stretch - start % stretch)
        yield start, min(start + left, end)
        start += left


def schedule(tiles: Iterable[Tile], room: int) -> Schedule:
    """Return the schedule for a GPU that computes `room` pieces at once."""
    tiles = list(tiles)
    total = sum(tile.end - tile.begin for tile in tiles)
    longest = max(LEAST_SPLIT, -(-total // max(1, room)))
    pieces: list[AttentionPiece] = []
    partials = 0
    for tile in tiles:
        count = -(-(tile.end - tile.begin) // longest)
        if count <= 1:
            pieces.append(AttentionPiece(*tile, partial=-1))
            continue
        for number, (begin, end) in enumerate(_cut(tile.begin, tile.end, count)):
            pieces.append(AttentionPiece(*tile[:4], begin, end, partials + number, partials, count))
        partials += count
    pieces.sort(key=lambda piece: piece.begin - piece.end)  # long pieces first: none is left at the end
    return Schedule(tuple(pieces), partials)


NOTHING = AttentionPiece(0, 0, 0, 0, 0, 0, -1)  # computes nothing and is written nowhere


def most_tiles(size: StepSize, queries: int, stretch: int | None, *, decodes: bool) -> int:
    """Return the most tiles that `tiles_of` makes of a step of this size.

    Each part of a chunk that lies in one stretch may have one tile that is not full.
    """
    if decodes:
        return size.decodes
    parts = size.chunks if stretch is None else 2 * size.chunks + size.rows // stretch
    return min(size.rows, (size.rows + parts * (queries - 1)) // queries) if size.chunks else 0


def most_pieces(tiles: int, room: int) -> int:
    """Return the most pieces that `schedule` makes of `tiles` tiles of any lengths.

    Each tile may have one piece that is not full, and all full pieces together are no more than `room`.
    """
    return tiles + max(1, room)


def most_partials(tiles: int, room: int) -> int:
    """Return the most partial results that `schedule` makes: each tile that it cuts has one piece that is not full."""
    return min(most_pieces(tiles, room), 2 * max(1, room))


def _cut(begin: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    length = end - begin
    bounds = [begin + length * number // count for number in range(count + 1)]
    yield from pairwise(bounds)
