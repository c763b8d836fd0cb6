"""Which pieces of attention a GPU computes side by side: none much longer than the others, however long a request is.

A tile is some queries of one request that follow each other; what it attends to is cut into splits of about equal
length, so many that all of the GPU's processors have work, and their results are put together afterwards. A tile short
enough stays whole, and writes its result itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from alignedserve.kernels.common.spans import Spans

LEAST_SPLIT = 256  # tokens: shorter ones cost more to put together than they save


class Tile(NamedTuple):
    row: int  # of its first query
    queries: int
    position: int  # of its first query in the request
    start: int  # of the request's pairs in the table
    begin: int  # of the tokens that it attends to
    end: int


class Piece(NamedTuple):
    """As the kernel reads it, eight numbers a row."""

    row: int
    queries: int
    position: int
    start: int
    begin: int
    end: int
    partial: int  # where its part of a result goes; -1: it is the whole
    unused: int = 0


class Merge(NamedTuple):
    """Partial results of one tile, that lie one after the other."""

    row: int
    queries: int
    first: int
    splits: int


@dataclass(frozen=True)
class Schedule:
    pieces: tuple[Piece, ...]
    merges: tuple[Merge, ...]
    num_partials: int


def tiles_of(spans: Spans, queries: int, window: int | None, *, decodes: bool) -> Iterator[Tile]:
    """Of the spans with one query, or of all others, at most so many queries each."""
    rows, tokens, starts = spans.rows.tolist(), spans.tokens.tolist(), spans.starts.tolist()
    for span, length in enumerate(tokens):
        count = rows[span + 1] - rows[span]
        if (count == 1) != decodes:
            continue
        for first in range(0, count, queries):
            last = min(first + queries, count)
            position, end = length - count + first, length - count + last
            begin = 0 if window is None else max(0, position - window + 1)
            yield Tile(rows[span] + first, last - first, position, starts[span], begin, end)


def schedule(tiles: Iterable[Tile], room: int) -> Schedule:
    """For a GPU that computes `room` pieces at once."""
    tiles = list(tiles)
    total = sum(tile.end - tile.begin for tile in tiles)
    longest = max(LEAST_SPLIT, -(-total // max(1, room)))
    pieces: list[Piece] = []
    merges: list[Merge] = []
    partials = 0
    for tile in tiles:
        count = -(-(tile.end - tile.begin) // longest)
        if count <= 1:
            pieces.append(Piece(*tile, partial=-1))
            continue
        merges.append(Merge(tile.row, tile.queries, partials, count))
        for begin, end in _cut(tile.begin, tile.end, count):
            pieces.append(Piece(*tile[:4], begin, end, partials))
            partials += 1
    pieces.sort(key=lambda piece: piece.begin - piece.end)  # long ones first: no long one is left over at the end
    return Schedule(tuple(pieces), tuple(merges), partials)


NOTHING = Piece(0, 0, 0, 0, 0, 0, -1)  # is computed and put nowhere
NO_MERGE = Merge(0, 0, 0, 0)


def most_pieces(tiles: int, room: int) -> int:
    """That `schedule` makes of so many tiles, whatever their lengths are: each may have one that is not full, and all
    that are full together are no more than there is room for."""
    return tiles + max(1, room)


def _cut(begin: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    length = end - begin
    bounds = [begin + length * number // count for number in range(count + 1)]
    yield from pairwise(bounds)
