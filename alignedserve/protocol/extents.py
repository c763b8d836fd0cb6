"""The kinds of pages, and how the arena is divided among pages of several kinds.

    extent 0               extent 1                  extent 2
    KV │ KV │ KV │ KV      8 │ 8 │ 8 │ 8 │ 8 │ 8 │   KV │ KV │ KV │ KV      (8: KV as int8)

The arena is a row of extents of equal size. An extent holds pages of one kind at a time, as many as fit; it changes its
kind only when none of its pages is in use. So pages of different sizes never fragment each other's room.

A page's number tells its kind and its place, whatever the extents hold at the time: pages of one kind are numbered
through all extents, and pages of the next kind go on from there. A worker needs no more than the number.

    8 pages as KV, 15 as int8 in an extent, 100 extents:    KV 0 ... 799    int8 800 ... 2299

This is plain Python, since the pool's core uses it as well as processes that map the arena.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

TOGETHER = 8  # pages of KV in an extent: 15 int8 pages fit in the room of 8 bf16 pages, with hardly any waste
MEMORY_PAGE, LINE = 4096, 64  # bytes


class PageKind(IntEnum):
    """The kind of contents of a page; 0 is a page that was never written."""

    KV = 1
    KV_INT8 = 2  # a full page of KV in at most half of its room; engine/forms/int8_pages.py


@dataclass(frozen=True)
class Extents:
    """The number of extents, and how many pages of each kind one holds: 0 for a kind that is not in use."""

    count: int
    kv: int = 1
    kv_int8: int = 0

    def per_extent(self, kind: PageKind) -> int:
        return (0, self.kv, self.kv_int8)[kind]

    @cached_property
    def kinds(self) -> tuple[PageKind, ...]:
        """Return the kinds in use; requests are stored as the first one."""
        return tuple(kind for kind in PageKind if self.per_extent(kind))

    @property
    def first_kind(self) -> PageKind:
        return self.kinds[0]

    @cached_property
    def _firsts(self) -> tuple[tuple[int, int, PageKind], ...]:
        """Return (number of the kind's first page, pages in an extent, kind) for each kind, the last kind first."""
        firsts, first = [], 0
        for kind in self.kinds:
            firsts.append((first, self.per_extent(kind), kind))
            first += self.count * self.per_extent(kind)
        return tuple(firsts[::-1])

    @cached_property
    def num_numbers(self) -> int:
        """Return the number of page numbers of all kinds; only those of an extent's present kind are pages."""
        return sum(self.count * self.per_extent(kind) for kind in self.kinds)

    def num_pages(self, kind: PageKind) -> int:
        """Return how many pages there are if all extents are of that kind."""
        return self.count * self.per_extent(kind)

    def place(self, page: int) -> tuple[int, int, PageKind]:
        """Return the page's extent, its index there, and its kind."""
        if 0 <= page < self.num_numbers:
            for first, per_extent, kind in self._firsts:
                if page >= first:
                    return (*divmod(page - first, per_extent), kind)
        raise ValueError(f"page {page} is outside 0..{self.num_numbers - 1}")

    def kind_of(self, page: int) -> PageKind:
        return self.place(page)[2]

    def pages(self, extent: int, kind: PageKind) -> range:
        """Return the extent's page numbers while it is of that kind."""
        for first, per_extent, its_kind in self._firsts:
            if its_kind is kind:
                return range(first + extent * per_extent, first + (extent + 1) * per_extent)
        return range(0)


@dataclass(frozen=True)
class PageBytes:
    """The bytes of a page's payload by kind: 0 for a kind that is not in use."""

    kv: int = 0
    kv_int8: int = 0

    def payload(self, kind: PageKind) -> int:
        return (0, self.kv, self.kv_int8)[kind]

    def stride(self, kind: PageKind) -> int:
        """Return the distance of two payloads in an extent; KV begins at pages of memory."""
        align = MEMORY_PAGE if kind is PageKind.KV else LINE
        return -(-self.payload(kind) // align) * align

    def extent(self, extents: Extents) -> int:
        return extents.kv * self.stride(PageKind.KV)

    def divide(self, pages: int) -> Extents:
        """Return extents with room for `pages` pages of KV; with a single kind no page is lost."""
        if not self.kv_int8:
            return Extents(pages)
        int8 = TOGETHER * self.stride(PageKind.KV) // self.stride(PageKind.KV_INT8)
        return Extents(pages // TOGETHER, kv=TOGETHER, kv_int8=int8)
