"""The pages that best-effort requests keep from real-time ones, for which some pages are reserved.

The unit is a page of the first kind. A page of that kind counts if a best-effort request has it, or it is leased for
one. Pages of another kind cannot be taken one by one: while one page of an extent is in use, no KV fits there. So an
extent of another kind counts as a whole as soon as one of its pages is best-effort:

    8 pages as KV, 15 as int8 in an extent

    extent 0   KV    3 pages best-effort                                   3
    extent 1   int8  1 page best-effort, 6 real-time, 8 free               8
    extent 2   int8  2 pages real-time, 13 free                            0

Real-time requests do not change this number, so what they give back is theirs again. As long as best-effort requests
take only what leaves the reserve free, they never have more than all pages without the reserve.
"""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.kvpool.arena.extents import Extents


class BestEffort:
    def __init__(self, extents: Extents) -> None:
        self._extents, self._first = extents, extents.first_kind
        self._num_alone = 0  # best-effort pages of the first kind
        self._in_extent: dict[int, int] = {}  # extent of another kind -> best-effort pages there; never 0

    @property
    def num_pages(self) -> int:
        return self._num_alone + len(self._in_extent) * self._extents.per_extent(self._first)

    @property
    def in_extents(self) -> Iterable[int]:
        """Return the extents of other kinds that have best-effort pages."""
        return self._in_extent

    def is_in(self, extent: int) -> bool:
        """Return whether an extent of another kind counts already."""
        return extent in self._in_extent

    def gain(self, page: int) -> None:
        extent, _, kind = self._extents.place(page)
        if kind is self._first:
            self._num_alone += 1
        else:
            self._in_extent[extent] = self._in_extent.get(extent, 0) + 1

    def lose(self, page: int) -> None:
        extent, _, kind = self._extents.place(page)
        if kind is self._first:
            self._num_alone -= 1
        elif self._in_extent[extent] == 1:
            del self._in_extent[extent]
        else:
            self._in_extent[extent] -= 1
