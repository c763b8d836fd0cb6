"""The owners of the arena's pages. Only page numbers are here; workers read and write the bytes.

                lease                    adopt                      hold
       free ───────────▶ leased to a ───────────▶ an entry's ◀──────────────── idle: named by its tokens,
        ▲                   holder                    │                            kept for prompts with the
        ├── give_back, ───────┘                       │ free_entry                 same prefix
        │   holder_gone                               ├── named ───────────────────▶ │
        │                                             ▼                              │
        ◀─────────────────────────────────────────────┴──────── evicted by a lease ◀─┘

A lease has no time limit: it ends when its holder gives it back, hands it on, or is gone. Full pages never change, so
several entries may share one, as long as all of them only read it. Idle pages are segmented: a page that was used
again, or that came again after it was evicted, stays longer than others (segmented LRU).

Compression writes a page anew into another page. Meanwhile entries keep the old page, and it is not free even if no
entry has it any more. Then the new page takes its place, its name included, or goes back.

Leases and entries have a class. Some pages are reserved for real-time requests: best-effort requests take none that
would leave fewer than these (reserve.py). A page that both classes hold counts as best-effort, since it will be when
the real-time entry has gone. Compressed pages count as best-effort too, which they nearly always are: they lie in
extents that are in use, and begin a new extent only where the reserve stays whole beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile, zip_longest

from alignedserve.core import ServiceClass, Usage
from alignedserve.errors import LeaseError
from alignedserve.kvpool.arena.extents import Extents, FreePages, PageKind
from alignedserve.kvpool.holders import Holders
from alignedserve.kvpool.reserve import BestEffort
from alignedserve.scheduling.segmented_lru import PROTECTED_SHARE, EvictedNames, SegmentedLru


class Pages:
    def __init__(self, extents: Extents | int, num_reserved: int = 0) -> None:
        """Start with these extents, or so many pages of kind KV; reserve some of the first kind for real-time."""
        extents = Extents(extents) if isinstance(extents, int) else extents
        self._num_reserved = num_reserved
        self._free = FreePages(extents)
        self._leases: dict[str, dict[int, ServiceClass]] = {}  # holder -> page -> class, never empty
        self._entries: dict[str, list[int]] = {}  # entry -> its pages, in the order of its tokens
        self._classes: dict[str, ServiceClass] = {}  # entry -> class
        self._holders = Holders()
        self._best_effort = BestEffort(extents)  # pages that best-effort requests keep from real-time ones
        self._named: dict[int, int] = {}  # name (hash of its tokens and all before) -> page
        self._names: dict[int, int] = {}  # page -> its name
        self._idle = {kind: SegmentedLru(int(extents.num_pages(kind) * PROTECTED_SHARE)) for kind in extents.kinds}
        self._evicted = EvictedNames(extents.num_pages(extents.first_kind))
        self._compressing: dict[int, int] = {}  # page -> the page that will take its place
        self._incompressible: set[int] = set()

    @property
    def extents(self) -> Extents:
        return self._free.extents

    @property
    def num_free(self) -> int:
        """Return how many pages a lease may take; idle pages count as free."""
        return self._free.num_for(self.extents.first_kind)

    @property
    def free_share(self) -> float:
        """Return the free share of the pages without the reserve, at which best-effort requests stop."""
        all_pages = self.extents.num_pages(self.extents.first_kind)
        return self.room(ServiceClass.BE) / max(1, all_pages - self._num_reserved)

    @property
    def num_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    @property
    def num_leased(self) -> int:
        return sum(map(len, self._leases.values()))

    @property
    def num_stored(self) -> int:
        """Return how many pages entries have; a shared page counts once."""
        return len(self._holders)

    @property
    def best_effort(self) -> int:
        """Return how many pages best-effort requests keep from real-time ones; never pages of the reserve."""
        return self._best_effort.num_pages

    @property
    def usage(self) -> Usage:
        held = self._holders
        rt, be = len(held) - held.num_best_effort, held.num_best_effort - held.num_shared
        compressing = sum(page not in held for page in self._compressing)  # kept though no entry has them
        free = len(self._free)
        return Usage(rt, be, held.num_shared, self.num_idle, self.num_leased + compressing, free)

    @property
    def numbers(self) -> list[int]:
        """Return the pages that are free, idle, leased, held or being compressed; each page must come once."""
        leased = (page for pages in self._leases.values() for page in pages)
        idle = (page for pages in self._idle.values() for page in pages)
        return [*self._free, *idle, *leased, *dict.fromkeys((*self._holders, *self._compressing))]

    @property
    def all_numbers(self) -> list[int]:
        """Return the pages that `numbers` must have: those of each extent's present kind."""
        return list(self._free.numbers)

    @property
    def entries(self) -> set[str]:
        return set(self._entries)

    def pages_of(self, entry: str) -> tuple[int, ...]:
        return tuple(self._entries.get(entry, ()))

    def class_of(self, entry: str) -> ServiceClass:
        return self._classes[entry]

    @property
    def leases(self) -> Iterable[tuple[str, int]]:
        """Return the holders of leases, each with how many pages it has."""
        return [(holder, len(pages)) for holder, pages in self._leases.items()]

    def leased_to(self, holder: str) -> frozenset[int]:
        return frozenset(self._leases.get(holder, ()))

    def lease(
        self, holder: str, count: int, service: ServiceClass = ServiceClass.RT, most: int = 0
    ) -> tuple[int, ...] | None:
        """Lease `count` more pages to the holder, for requests of this class only; None where there are fewer.

        Lease up to `most` pages where that is more and there are so many.
        """
        if count < 0:
            raise ValueError(f"cannot lease {count} pages")
        room = self.room(service)
        if count > room:
            return None
        return self._lease(holder, max(count, min(most, room)), service, self.extents.first_kind)

    def adopt(
        self,
        holder: str,
        pages: Sequence[int],
        entry: str,
        names: Sequence[int] = (),
        service: ServiceClass = ServiceClass.RT,
    ) -> None:
        """Give pages of the holder's lease for this class to the entry, after the pages that it has.

        The first of them are full, and have these names. Where the pool has a page of that name already, that page
        takes the place of the new one, which becomes free.
        """
        self._end_lease(holder, pages, service)
        held = self._entries.setdefault(entry, [])
        self._classes[entry] = service
        for page, name in zip_longest(pages, names[: len(pages)]):
            known = None if name is None else self._named.get(name)
            if known is not None and service is ServiceClass.BE and self._is_of_reserve(known):
                self.forget(known)
                known = None
            if known is not None:
                self._free.give(page)
                page = known
                if self._lru(page).again(page):
                    self._free.wake(page)
            elif name is not None:
                self._named[name], self._names[page] = page, name
                if self._evicted.has_back(name):
                    self._lru(page).again(page)
            held.append(page)
            self._gain(page, entry, service)

    def hold(self, entry: str, names: Sequence[int], service: ServiceClass = ServiceClass.RT) -> tuple[int, ...]:
        """Give the pages of the longest known prefix to the entry, which has none yet.

        A best-effort entry takes none of the reserve, to which pages count that only real-time entries have.
        """
        if entry in self._entries:
            raise LeaseError(f"entry {entry} has pages already")
        known = (self._named[name] for name in takewhile(self._named.__contains__, names))
        pages = list(known if service is ServiceClass.RT else self._beyond_reserve(known))
        for page in pages:
            if self._lru(page).again(page):
                self._free.wake(page)
            self._gain(page, entry, service)
        if pages:
            self._entries[entry], self._classes[entry] = pages, service
        return tuple(pages)

    def give_back(self, holder: str, pages: Sequence[int]) -> None:
        self._end_lease(holder, pages)
        for page in pages:
            self._free.give(page)

    def keep_only(self, holder: str, kept: Sequence[int], service: ServiceClass = ServiceClass.RT) -> None:
        """Free what the holder has leased for this class beyond these pages: it will not write there."""
        leased = {page for page, its_class in self._leases.get(holder, {}).items() if its_class is service}
        self.give_back(holder, sorted(leased - set(kept)))

    def shorten(self, entry: str, count: int) -> None:
        """Leave the entry only its first `count` pages; it may have none until it adopts others."""
        held = self._entries[entry]
        for page in reversed(held[count:]):
            self._let_go(page, entry)
        del held[count:]

    def free_entry(self, entry: str) -> None:
        if entry not in self._entries:
            raise LeaseError(f"entry {entry} has no pages")
        del self._classes[entry]
        # From the end on: a page is of use only together with the pages before it, so those should stay longer.
        for page in reversed(self._entries.pop(entry)):
            self._let_go(page, entry)

    def holder_gone(self, holder: str) -> int:
        """Free what the holder has leased, and return how many pages. The holder's process must be dead."""
        pages = sorted(self._leases.get(holder, ()))
        self.give_back(holder, pages)
        return len(pages)

    def forget(self, page: int) -> None:
        """Take the page's name away, since it does not hold what the name says: no entry gets it any more."""
        name = self._names.pop(page, None)
        if name is not None:
            del self._named[name]
            if self._lru(page).forget(page):
                self._free.wake(page)
                self._free_up(page)

    # --- Compression

    def entries_with(self, page: int) -> Iterable[str]:
        return self._holders.entries_of(page)

    def can_compress(self, page: int) -> bool:
        """Return whether the page can be compressed, as far as is known here; its entry knows whether it is full."""
        return page not in self._compressing and self.is_to_be_compressed(page)

    def is_to_be_compressed(self, page: int) -> bool:
        """Return whether the page is to be compressed some time: it holds KV, and no worker failed to compress it."""
        return page not in self._incompressible and self.extents.kind_of(page) is PageKind.KV

    def room_to_compress(self, begun: bool = False) -> int:
        """Return how many pages compression may take; with `begun`, only those in extents that are in use.

        The reserve stays as it is for either class, since compressed pages are nearly always best-effort.
        """
        if PageKind.KV_INT8 not in self.extents.kinds:
            return 0
        places = self._free.num_begun(PageKind.KV_INT8)
        if not self._is_reserve_whole:
            places = sum(map(self._free.num_left, self._best_effort.in_extents))
        extents = min(self._free.num_untaken, self._num_to_begin)
        return places if begun else places + extents * self.extents.per_extent(PageKind.KV_INT8)

    def compress(self, holder: str, pages: Sequence[int]) -> tuple[int, ...] | None:
        """Lease the holder a page to write each of these pages to; None where there are too few."""
        if len(pages) > self.room_to_compress():
            return None
        into = self._lease(holder, len(pages), ServiceClass.BE, PageKind.KV_INT8)
        self._compressing.update(zip(pages, into, strict=True))
        return into

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
        if self._holders.has_best_effort(page):
            self._best_effort.lose(page)
            self._best_effort.gain(into)
        self._holders.move(page, into)
        if (name := self._names.pop(page, None)) is not None:
            self._names[into], self._named[name] = name, into
            if self._lru(page).forget_return(page):
                self._lru(into).again(into)
        self._free_up(page)

    def cannot_compress(self, page: int) -> None:
        """Note that a worker has failed to compress the page: it is not tried again."""
        self._incompressible.add(page)

    # --- The reserve

    def room(self, service: ServiceClass) -> int:
        """Return how many pages a request of this class may take now."""
        return self.num_free if service is ServiceClass.RT else max(0, self.num_free - self._num_reserved)

    @property
    def _is_reserve_whole(self) -> bool:
        """Return whether the reserve is free; otherwise real-time requests use some of it themselves."""
        return self.num_free >= self._num_reserved

    @property
    def _num_to_begin(self) -> int:
        """Return how many extents may change their kind, or be begun, beside the reserve."""
        return self.room(ServiceClass.BE) // self.extents.per_extent(self.extents.first_kind)

    def _may_fill(self, extent: int) -> bool:
        """Return whether compressed pages may go to this extent.

        An extent in which only real-time requests have pages becomes theirs again when they go, so it stays as it is.
        """
        return self._is_reserve_whole or self._best_effort.is_in(extent)

    def _beyond_reserve(self, pages: Iterator[int]) -> Iterator[int]:
        """Yield the first of these pages, as many as a best-effort entry may hold."""
        room, woken = self.num_free - self._num_reserved, set[int]()
        for page in pages:
            extent, _, kind = self.extents.place(page)
            if not (self._holders.has_best_effort(page) or self._best_effort.is_in(extent) or extent in woken):
                room -= self._free.lost_with(page)
                if room < 0:
                    return
            if kind is not self.extents.first_kind:
                woken.add(extent)
            yield page

    def _is_of_reserve(self, page: int) -> bool:
        """Return whether a best-effort entry that gives another page for this one would take some of the reserve."""
        extent, _, kind = self.extents.place(page)
        if kind is self.extents.first_kind or self._best_effort.is_in(extent):
            return False
        return self.num_free + 1 - self._free.lost_with(page) < self._num_reserved

    # --- One page

    def _lease(self, holder: str, count: int, service: ServiceClass, kind: PageKind) -> tuple[int, ...]:
        pages = []
        for _ in range(count):
            pages.append(page := self._take_to_compress() if kind is PageKind.KV_INT8 else self._take(kind))
            if service is ServiceClass.BE:
                self._best_effort.gain(page)
        if pages:
            self._leases.setdefault(holder, {}).update(dict.fromkeys(pages, service))
        return tuple(pages)

    def _gain(self, page: int, entry: str, service: ServiceClass) -> None:
        if self._holders.add(page, entry, service):
            self._best_effort.gain(page)

    def _let_go(self, page: int, entry: str) -> None:
        if self._holders.remove(page, entry):
            self._best_effort.lose(page)
        if page not in self._holders and page not in self._compressing:
            self._put_down(page)

    def _put_down(self, page: int) -> None:
        """Make the page idle, or free: no entry has it any more."""
        if page in self._names:
            self._lru(page).add(page)
            self._free.rest(page)
        else:
            self._free_up(page)

    def _free_up(self, page: int) -> None:
        self._incompressible.discard(page)
        self._free.give(page)

    def _take(self, kind: PageKind) -> int:
        page = self._free.take(kind)
        if page is None:
            self._evict([self._idle[kind].pop()] if self._idle[kind] else self._idle_in(self._free.idle_for(kind)))
            page = self._free.take(kind)
        assert page is not None, "there were enough of this kind, free or idle"
        return page

    def _take_to_compress(self) -> int:
        """Take a page of an extent in use, else of a new one beside the reserve, else evict idle pages."""
        kind = PageKind.KV_INT8
        page = self._free.take_begun(kind, self._may_fill)
        if page is None and self._num_to_begin:
            page = self._free.take(kind)
        if page is None and (idle := self._idle_in_use(kind)) is not None:
            self._evict([idle])
            page = self._free.take_begun(kind, self._may_fill)
        return self._take(kind) if page is None else page

    def _idle_in_use(self, kind: PageKind) -> int | None:
        """Take the idle page of a begun extent that is next to be evicted, or None."""
        for page in self._idle[kind]:
            extent = self.extents.place(page)[0]
            if self._free.is_begun(extent) and self._may_fill(extent):
                self._idle[kind].forget(page)
                return page
        return None

    def _evict(self, idle: Iterable[int]) -> None:
        for page in idle:
            name = self._names.pop(page)
            del self._named[name]
            self._evicted.note(name)
            self._free.wake(page)
            self._free_up(page)

    def _idle_in(self, pages: range) -> list[int]:
        return [page for page in pages if self._lru(page).forget(page)]

    def _lru(self, page: int) -> SegmentedLru:
        return self._idle[self.extents.kind_of(page)]

    def _end_lease(self, holder: str, pages: Sequence[int], service: ServiceClass | None = None) -> None:
        """End the lease of these pages; nothing changes where one is not the holder's or not for this class."""
        leased = self._leases.get(holder, {})
        ending = set(pages)
        if foreign := sorted(ending - leased.keys()):
            raise LeaseError(f"pages {foreign} are not leased to {holder}")
        # Real-time requests may use pages that were leased for best-effort ones.
        if others := sorted(page for page in ending if service is ServiceClass.BE and leased[page] is not service):
            raise LeaseError(f"pages {others} are leased to {holder} for real-time requests only")
        if len(ending) < len(pages):
            raise LeaseError(f"{holder} names a page twice: {list(pages)}")
        for page in ending:
            if leased.pop(page) is ServiceClass.BE:
                self._best_effort.lose(page)
        if not leased:
            self._leases.pop(holder, None)
