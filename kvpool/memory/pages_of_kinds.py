"""The owners of pages, where pages of waiting requests become int8 pages, which are smaller (ALISE §3.2).

To compress a page, a worker copies it to another page in int8. Until the copy has ended, entries keep the old page,
which stays taken even if all these entries leave. Then the new page replaces the old page and gets its name, or is
given back.

The pool's extents (protocol/extents.py) hold pages of one kind at a time: while one int8 page of an extent is in
use, no KV fits there. So compressed pages go to extents that are in use before they begin a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain

from alignedserve.core import Usage
from alignedserve.kvpool.memory.pages import FreePages, Pages
from alignedserve.protocol.extents import Extents, PageKind
from alignedserve.scheduling.segmented_lru import PROTECTED_SHARE, SegmentedLru


class FreeExtents(FreePages):
    """The free pages, and the kind of each extent.

    A page is free, taken, or idle (kept, but it may be taken). An extent without a taken page may change its kind; with
    one it is *begun*. Lower numbers are taken first, so that taken pages lie together and whole extents stay free; for
    kinds other than the first, the caller may ask for pages in begun extents.
    """

    def __init__(self, extents: Extents) -> None:
        super().__init__(0)  # its pages are numbered by kind, below
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

    def is_begun(self, extent: int) -> bool:
        return self._num_taken[extent] > 0

    def __len__(self) -> int:
        return len(self._free)

    def take(self, kind: PageKind = PageKind.KV) -> int | None:
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

    def take_begun(self, kind: PageKind) -> int | None:
        """Take a free page of a kind other than the first, in a begun extent; None where there is none."""
        extent = next(iter(self._open[kind]), None)
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
            has_free = self._num_taken[extent] + self._num_idle[extent] < self.extents.per_extent(kind)
            self._note(self._open[kind], extent, has_free and self.is_begun(extent))

    def _note(self, extents: dict[int, None], extent: int, belongs: bool) -> None:
        if belongs:
            extents.setdefault(extent)
        else:
            extents.pop(extent, None)


class CompressiblePages(Pages):
    def __init__(self, extents: Extents) -> None:
        self.extents, self._extents = extents, (free := FreeExtents(extents))
        super().__init__(extents.num_pages(PageKind.KV), free)
        self._idle_int8 = SegmentedLru(int(extents.num_pages(PageKind.KV_INT8) * PROTECTED_SHARE))
        self._compressing: dict[int, int] = {}  # page -> the page that will take its place
        self._incompressible: set[int] = set()

    @property
    def num_free(self) -> int:
        return self._extents.num_for(PageKind.KV)

    @property
    def free_share(self) -> float:
        return self.num_free / max(1, self.num_pages)

    @property
    def num_idle(self) -> int:
        return len(self._idle) + len(self._idle_int8)

    @property
    def usage(self) -> Usage:
        compressing = sum(page not in self._holders for page in self._compressing)  # kept though no entry has them
        usage = super().usage
        return replace(usage, leased=usage.leased + compressing)

    @property
    def numbers(self) -> list[int]:
        compressing = (page for page in self._compressing if page not in self._holders)
        return [*super().numbers, *self._idle_int8, *compressing]

    @property
    def all_numbers(self) -> list[int]:
        return list(self._extents.numbers)

    # --- Compression

    def entries_with(self, page: int) -> Iterable[str]:
        return self._holders.entries_of(page)

    def can_compress(self, page: int) -> bool:
        """Return whether the page can be compressed, if it is full: only its entry knows that."""
        return page not in self._compressing and self.is_to_be_compressed(page)

    def is_to_be_compressed(self, page: int) -> bool:
        """Return whether the page is to be compressed some time: it holds KV, and no worker failed to compress it."""
        return page not in self._incompressible and self.extents.kind_of(page) is PageKind.KV

    def room_to_compress(self, begun: bool = False) -> int:
        """Return how many pages compression may take; with `begun`, only those in extents that are in use."""
        kind = PageKind.KV_INT8
        return self._extents.num_begun(kind) if begun else self._extents.num_for(kind)

    def compress(self, holder: str, pages: Sequence[int]) -> tuple[int, ...] | None:
        """Lease the holder a page to write each of these pages to; None where there are too few."""
        if len(pages) > self.room_to_compress():
            return None
        into = []
        for page in pages:
            into.append(taken := self._take_to_compress())
            self._compressing[page] = taken
        return self._lease(holder, into)

    def compressed(self, holder: str, page: int, take: bool) -> None:
        """Put the new page in the place of the old one, or take it back: the holder writes no more."""
        into = self._compressing.pop(page)
        holding = self._holders.entries_of(page)
        if not take or not holding:
            self.give_back(holder, [into])
            if not holding:
                self._put_down(page)
            return
        self._end_lease(holder, [into])
        for entry in holding:
            pages = self._entries[entry]
            pages[pages.index(page)] = into
        self._holders.move(page, into)
        if (name := self._names.pop(page, None)) is not None:
            self._names[into], self._named[name] = name, into
            if self._lru(page).forget_return(page):
                self._lru(into).again(into)
        self._free_up(page)

    def cannot_compress(self, page: int) -> None:
        """Note that a worker has failed to compress the page: it is not tried again."""
        self._incompressible.add(page)

    # --- One page

    def _put_down(self, page: int) -> None:
        if page not in self._compressing:
            super()._put_down(page)

    def _free_up(self, page: int) -> None:
        self._incompressible.discard(page)
        super()._free_up(page)

    def _take(self, kind: PageKind = PageKind.KV) -> int:
        page, idle = self._extents.take(kind), self._idle if kind is PageKind.KV else self._idle_int8
        if page is None:
            for evicted in [idle.pop()] if idle else self._idle_in(self._extents.idle_for(kind)):
                self._evict(evicted)
            page = self._extents.take(kind)
        assert page is not None, "there were enough of this kind, free or idle"
        return page

    def _take_to_compress(self) -> int:
        """Take a page of an extent in use, else of a new one, else evict idle pages."""
        kind = PageKind.KV_INT8
        page = self._extents.take_begun(kind)
        if page is None:
            page = self._extents.take(kind)
        if page is None and (idle := self._idle_in_use()) is not None:
            self._evict(idle)
            page = self._extents.take_begun(kind)
        return self._take(kind) if page is None else page

    def _idle_in_use(self) -> int | None:
        """Take the idle int8 page of a begun extent that is next to be evicted, or None."""
        for page in self._idle_int8:
            if self._extents.is_begun(self.extents.place(page)[0]):
                self._idle_int8.forget(page)
                return page
        return None

    def _idle_in(self, pages: range) -> list[int]:
        return [page for page in pages if self._lru(page).forget(page)]

    def _lru(self, page: int) -> SegmentedLru:
        return self._idle if self.extents.kind_of(page) is PageKind.KV else self._idle_int8
