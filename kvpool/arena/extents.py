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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import chain

TOGETHER = 8  # pages of KV in an extent: 15 int8 pages fit in the room of 8 bf16 pages, with hardly any waste
MEMORY_PAGE, LINE = 4096, 64  # bytes


class PageKind(IntEnum):
    """The kind of contents of a page; 0 is a page that was never written."""

    KV = 1
    KV_INT8 = 2  # a full page of KV in at most half of its room; engine/copying/int8_pages.py


@dataclass(frozen=True)
class Extents:
    """The number of extents, and how many pages of each kind one holds: 0 for a kind that is not in use."""

    count: int
    kv: int = 1
    kv_int8: int = 0

    @cached_property
    def _per_extent(self) -> tuple[int, ...]:
        return 0, self.kv, self.kv_int8

    def per_extent(self, kind: PageKind) -> int:
        return self._per_extent[kind]

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

    @cached_property
    def _of(self) -> tuple[int, ...]:
        return 0, self.kv, self.kv_int8

    def payload(self, kind: PageKind) -> int:
        return self._of[kind]

    def stride(self, kind: PageKind) -> int:
        """Return the distance of two payloads in an extent; KV begins at pages of memory."""
        align = MEMORY_PAGE if kind is PageKind.KV else LINE
        return -(-self.payload(kind) // align) * align

    def extent(self, extents: Extents) -> int:
        return extents.kv * self.stride(PageKind.KV)

    def divide(self, pages: int) -> Extents:
        """Return extents with room for so many pages of KV; with a single kind no page is lost."""
        if not self.kv_int8:
            return Extents(pages)
        int8 = TOGETHER * self.stride(PageKind.KV) // self.stride(PageKind.KV_INT8)
        return Extents(pages // TOGETHER, kv=TOGETHER, kv_int8=int8)


class FreePages:
    """The free pages, and the kind of each extent.

    A page is free, taken, or idle (kept, but it may be taken). An extent without a taken page may change its kind; with
    one it is *begun*. Lower numbers are taken first, so that taken pages lie together and whole extents stay free; for
    kinds other than the first, the caller may ask for pages in begun extents.
    """

    def __init__(self, extents: Extents) -> None:
        self.extents = extents
        kinds, count = extents.kinds, extents.count
        self._kind = [extents.first_kind] * count  # extent -> kind
        self._num_taken, self._num_idle = [0] * count, [0] * count  # extent -> pages
        self._num_extents = dict.fromkeys(kinds, 0)
        self._taken_of = dict.fromkeys(kinds, 0)
        self._untaken: dict[PageKind, dict[int, None]] = {
            kind: {} for kind in kinds
        }  # kind -> extents without a taken page
        self._empty: dict[PageKind, dict[int, None]] = {
            kind: {} for kind in kinds
        }  # kind -> extents with free pages only
        self._open: dict[PageKind, dict[int, None]] = {
            kind: {} for kind in kinds[1:]
        }  # kind -> begun extents that have a free page
        self._free: set[int] = set()
        self._heaps: dict[PageKind, list[int]] = {kind: [] for kind in kinds}  # all free pages, and some that were free
        first = extents.first_kind
        self._num_extents[first] = count
        self._untaken[first] = dict.fromkeys(range(count))
        self._empty[first] = dict.fromkeys(range(count))
        self._free.update(range(extents.num_pages(first)))
        self._heaps[first] = sorted(self._free)

    def __iter__(self) -> Iterator[int]:
        return iter(self._free)

    @property
    def numbers(self) -> Iterator[int]:
        """Return all present pages: those of each extent's kind."""
        return chain.from_iterable([self.extents.pages(extent, kind) for extent, kind in enumerate(self._kind)])

    def num_for(self, kind: PageKind) -> int:
        """Return how many pages of the kind may be taken, free or idle, extents that may change their kind included."""
        others = sum(len(untaken) for other, untaken in self._untaken.items() if other is not kind)
        per_extent = self.extents.per_extent(kind)
        return (self._num_extents[kind] + others) * per_extent - self._taken_of[kind]

    def num_begun(self, kind: PageKind) -> int:
        """Return how many of these lie in begun extents: taking them costs other kinds nothing."""
        begun = self._num_extents[kind] - len(self._untaken[kind])
        return begun * self.extents.per_extent(kind) - self._taken_of[kind]

    def num_left(self, extent: int) -> int:
        """Return how many pages of the extent are free or idle."""
        return self.extents.per_extent(self._kind[extent]) - self._num_taken[extent]

    def is_begun(self, extent: int) -> bool:
        return self._num_taken[extent] > 0

    @property
    def num_untaken(self) -> int:
        """Return how many extents have no taken page."""
        return sum(map(len, self._untaken.values()))

    def lost_with(self, page: int) -> int:
        """Return how many pages of the first kind are lost when this free or idle page is taken.

        A page of another kind costs all pages that its extent could hold, unless the extent is begun.
        """
        extent, _, kind = self.extents.place(page)
        first = self.extents.first_kind
        if kind is first:
            return 1
        return 0 if self.is_begun(extent) else self.extents.per_extent(first)

    def __len__(self) -> int:
        return len(self._free)

    def take(self, kind: PageKind) -> int | None:
        """Take a free page of the kind; None where there are none, or only idle ones."""
        page = self._pop(kind)
        if page is None:
            empty = next((other for other, extents in self._empty.items() if other is not kind and extents), None)
            if empty is None:
                return None
            self._change(next(reversed(self._empty[empty])), kind)
            page = self._pop(kind)
            assert page is not None, "an extent has just become of this kind"
        self._count(page, taken=1)
        return page

    def take_begun(self, kind: PageKind, may: Callable[[int], bool]) -> int | None:
        """Take a free page of a kind other than the first, in a begun extent that `may` allows; None for none."""
        extent = next(filter(may, self._open[kind]), None)
        if extent is None:
            return None
        page = next(page for page in self.extents.pages(extent, kind) if page in self._free)
        self._free.discard(page)
        self._count(page, taken=1)
        return page

    def idle_for(self, kind: PageKind) -> range:
        """Return the pages of an extent of another kind without a taken page: idle pages there must go first."""
        for other, extents in self._untaken.items():
            if other is not kind and extents:
                return self.extents.pages(next(reversed(extents)), other)
        return range(0)

    def give(self, page: int) -> None:
        """Make a taken page free."""
        self._count(page, taken=-1)
        self._add(page, self.extents.kind_of(page))

    def rest(self, page: int) -> None:
        """Make a taken page idle."""
        self._count(page, taken=-1, idle=1)

    def wake(self, page: int) -> None:
        """Make an idle page taken."""
        self._count(page, taken=1, idle=-1)

    def _pop(self, kind: PageKind) -> int | None:
        heap = self._heaps[kind]
        while heap:
            page = heappop(heap)
            if page in self._free:
                self._free.discard(page)
                return page
        return None

    def _change(self, extent: int, kind: PageKind) -> None:
        before = self._kind[extent]
        self._free.difference_update(self.extents.pages(extent, before))
        self._kind[extent] = kind
        self._num_extents[before] -= 1
        self._num_extents[kind] += 1
        for extents in (self._untaken, self._empty):
            del extents[before][extent]
            extents[kind][extent] = None
        for page in self.extents.pages(extent, kind):
            self._add(page, kind)

    def _add(self, page: int, kind: PageKind) -> None:
        self._free.add(page)
        heap = self._heaps[kind]
        heappush(heap, page)
        if len(heap) > 2 * self.extents.num_pages(kind):  # most of its numbers are no longer free
            heap[:] = {page for page in heap if page in self._free}
            heapify(heap)

    def _count(self, page: int, taken: int, idle: int = 0) -> None:
        extent, _, kind = self.extents.place(page)
        self._taken_of[kind] += taken
        self._num_taken[extent] += taken
        self._num_idle[extent] += idle
        self._note(self._untaken[kind], extent, not self._num_taken[extent])
        self._note(self._empty[kind], extent, not self._num_taken[extent] and not self._num_idle[extent])
        if kind in self._open:
            left = self.num_left(extent)
            self._note(self._open[kind], extent, self._num_idle[extent] < left and self.is_begun(extent))

    def _note(self, extents: dict[int, None], extent: int, belongs: bool) -> None:
        if belongs:
            extents.setdefault(extent)
        else:
            extents.pop(extent, None)
