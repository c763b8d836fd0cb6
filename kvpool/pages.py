"""Who owns which page of the arena: page numbers only, the bytes are the workers' business.

                lease                    adopt                      hold
       free ───────────▶ leased to a ───────────▶ an entry's ◀──────────────── idle: named by its tokens,
        ▲                   holder                    │                            nobody's, kept for whoever
        ├── give_back, ───────┘                       │ free_entry                 has the same beginning
        │   holder_gone                               ├── named ───────────────────▶ │
        │                                             ▼                              │
        ◀─────────────────────────────────────────────┴──────── evicted by a lease ◀─┘

A lease has no time limit: it ends when its holder gives it back, hands it on, or is gone. Full pages never change, so
several entries may share one, as long as all of them only read it. Idle pages are segmented: a page that was held again
stays longer than one that nobody has come back for (segmented LRU).

Compression takes another page and writes it anew. Meanwhile the old one stays what it is for everybody who has it, and
is free for nobody, even if none has it any more. Then the new one takes its place, its name included, or goes back.

Leases and entries have a class. Some pages are reserved for real-time ones: best-effort takes nothing that would leave
fewer than so many to be had (reserve.py). A page that both classes hold counts as best-effort, since it will be when
the real-time one has gone, and so does what is compressed, which nearly always is. Its new pages lie in extents that
are in use, and begin one only where the reserve stays whole beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile, zip_longest

from alignedserve.core import ServiceClass, Usage
from alignedserve.errors import LeaseError
from alignedserve.kvpool.arena.extents import Extents, FreePages, Kind
from alignedserve.kvpool.holders import Holders
from alignedserve.kvpool.reserve import BestEffort
from alignedserve.kvpool.segmented_lru import SegmentedLru

PROTECTED_SHARE = 0.8  # of all pages


class Pages:
    def __init__(self, extents: Extents | int, num_reserved: int = 0) -> None:
        """A number is that of pages that are all of kind KV; so many of the first kind are reserved for real-time
        requests."""
        extents = Extents(extents) if isinstance(extents, int) else extents
        self._num_reserved = num_reserved
        self._free = FreePages(extents)
        self._leases: dict[str, dict[int, ServiceClass]] = {}  # holder -> pages and what for, never empty
        self._entries: dict[str, list[int]] = {}  # entry -> pages, in the order of its tokens
        self._classes: dict[str, ServiceClass] = {}  # of the entries
        self._holders = Holders()
        self._best_effort = BestEffort(extents)  # what is leased for such requests, or held by one
        self._named: dict[int, int] = {}  # hash of its tokens and all before -> page
        self._names: dict[int, int] = {}  # page -> its hash
        self._idle = {kind: SegmentedLru(int(extents.num_pages(kind) * PROTECTED_SHARE)) for kind in extents.kinds}
        self._compressing: dict[int, int] = {}  # page -> the one that is to take its place
        self._incompressible: set[int] = set()

    @property
    def extents(self) -> Extents:
        return self._free.extents

    @property
    def num_free(self) -> int:
        """That a lease may take: idle ones are as good as free."""
        return self._free.num_for(self.extents.first_kind)

    @property
    def free_share(self) -> float:
        """Of all pages but the reserve: best-effort requests stop there, however much is left."""
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
        """Of the entries; a page that several share counts once."""
        return len(self._holders)

    @property
    def best_effort(self) -> int:
        """Pages, as requests are stored, that best-effort ones keep from real-time ones: never of the reserve."""
        return self._best_effort.num_pages

    @property
    def usage(self) -> Usage:
        held = self._holders
        rt, be = len(held) - held.num_best_effort, held.num_best_effort - held.num_shared
        compressing = sum(page not in held for page in self._compressing)  # kept though nobody has them
        free = len(self._free)
        return Usage(rt, be, held.num_shared, self.num_idle, self.num_leased + compressing, free)

    @property
    def numbers(self) -> list[int]:
        """Free, idle, leased, held or being compressed: each page once, as long as all is well."""
        leased = (page for pages in self._leases.values() for page in pages)
        idle = (page for pages in self._idle.values() for page in pages)
        return [*self._free, *idle, *leased, *dict.fromkeys((*self._holders, *self._compressing))]

    @property
    def all_numbers(self) -> list[int]:
        """What `numbers` must come to: the pages of each extent's present kind."""
        return list(self._free.numbers)

    @property
    def entries(self) -> set[str]:
        return set(self._entries)

    def of(self, entry: str) -> tuple[int, ...]:
        return tuple(self._entries.get(entry, ()))

    def class_of(self, entry: str) -> ServiceClass:
        return self._classes[entry]

    def leased_to(self, holder: str) -> frozenset[int]:
        return frozenset(self._leases.get(holder, ()))

    def lease(
        self, holder: str, count: int, service: ServiceClass = ServiceClass.RT, most: int = 0
    ) -> tuple[int, ...] | None:
        """So many free pages for the holder to write to, in addition to what it has; None where there are fewer.

        Up to `most`, where that is more and there are as many. They are for requests of this class only.
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
        """Pages of the holder's lease for this class become the entry's, after those that it already has.

        The first of them are full, and `names` are the hashes of their tokens. Where another entry has stored the same
        tokens before, that page takes the place of the new one, which is free.
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
                if self._lru(page).discard(page):
                    self._free.wake(page)
            elif name is not None:
                self._named[name], self._names[page] = page, name
            held.append(page)
            self._gain(page, entry, service)

    def hold(self, entry: str, names: Sequence[int], service: ServiceClass = ServiceClass.RT) -> tuple[int, ...]:
        """The pages of the longest known beginning become the entry's, which has none yet.

        Of a best-effort one, as far as it takes nothing of the reserve: pages that only real-time ones have count, too.
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
        """What the holder has leased for this class beyond these is free: it has said that it will not write there."""
        leased = {page for page, of in self._leases.get(holder, {}).items() if of is service}
        self.give_back(holder, sorted(leased - set(kept)))

    def shorten(self, entry: str, count: int) -> None:
        """The entry has only its first `count` pages from now on, perhaps none until it adopts others."""
        held = self._entries[entry]
        for page in reversed(held[count:]):
            self._let_go(page, entry)
        del held[count:]

    def free_entry(self, entry: str) -> None:
        if entry not in self._entries:
            raise LeaseError(f"entry {entry} has no pages")
        del self._classes[entry]
        # From its end on: a page is of use only together with those before it, so those shall stay longer.
        for page in reversed(self._entries.pop(entry)):
            self._let_go(page, entry)

    def holder_gone(self, holder: str) -> int:
        """Frees what the holder has leased, and says how many pages that were. Its process must be dead."""
        pages = sorted(self._leases.get(holder, ()))
        self.give_back(holder, pages)
        return len(pages)

    def forget(self, page: int) -> None:
        """It does not hold what its name says: nobody is to get it any more."""
        name = self._names.pop(page, None)
        if name is not None:
            del self._named[name]
            if self._lru(page).forget(page):
                self._free.wake(page)
                self._free_up(page)

    # --- Compression

    def entries_with(self, page: int) -> Iterable[str]:
        return self._holders.of(page)

    def can_compress(self, page: int) -> bool:
        """Whether nothing is known that speaks against it. That it is full, its entry must know."""
        return page not in self._compressing and self.is_to_be_compressed(page)

    def is_to_be_compressed(self, page: int) -> bool:
        """Now, later or at this moment: it is of KV, and was not tried in vain."""
        return page not in self._incompressible and self.extents.kind_of(page) is Kind.KV

    def room_to_compress(self, begun: bool = False) -> int:
        """Pages that may be had for what is compressed, or those for which no extent is begun.

        Whoever they are for: compressed pages are nearly always best-effort, so the reserve stays as it is.
        """
        if Kind.KV_INT8 not in self.extents.kinds:
            return 0
        places = self._free.num_begun(Kind.KV_INT8)
        if not self._is_reserve_whole:
            places = sum(map(self._free.num_left, self._best_effort.in_extents))
        extents = min(self._free.num_untaken, self._num_to_begin)
        return places if begun else places + extents * self.extents.per_extent(Kind.KV_INT8)

    def compress(self, holder: str, pages: Sequence[int]) -> tuple[int, ...] | None:
        """For each of these pages of entries one to write it to, leased to the holder; None where there are too few."""
        if len(pages) > self.room_to_compress():
            return None
        into = self._lease(holder, len(pages), ServiceClass.BE, Kind.KV_INT8)
        self._compressing.update(zip(pages, into, strict=True))
        return into

    def compressed(self, holder: str, page: int, take: bool) -> None:
        """The holder writes no more: the new page takes the place of the old one wherever that is, or goes back."""
        into = self._compressing.pop(page)
        holding = self._holders.of(page)
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
        """It was tried, and in its life is not tried again."""
        self._incompressible.add(page)

    # --- The reserve

    def room(self, service: ServiceClass) -> int:
        """Pages that somebody of this class may take now."""
        return self.num_free if service is ServiceClass.RT else max(0, self.num_free - self._num_reserved)

    @property
    def _is_reserve_whole(self) -> bool:
        """Else real-time requests have some of it themselves."""
        return self.num_free >= self._num_reserved

    @property
    def _num_to_begin(self) -> int:
        """Extents that may change their kind, or be begun, beside the reserve."""
        return self.room(ServiceClass.BE) // self.extents.per_extent(self.extents.first_kind)

    def _may_fill(self, extent: int) -> bool:
        """Whether its places are to be had for what is compressed: one in which only real-time requests have pages is
        theirs again when they go, but for this."""
        return self._is_reserve_whole or self._best_effort.is_in(extent)

    def _beyond_reserve(self, pages: Iterator[int]) -> Iterator[int]:
        """The first of them, as many as somebody best-effort may hold."""
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
        """Whether a best-effort entry that has a page to give for this one would take of the reserve with it."""
        extent, _, kind = self.extents.place(page)
        if kind is self.extents.first_kind or self._best_effort.is_in(extent):
            return False
        return self.num_free + 1 - self._free.lost_with(page) < self._num_reserved

    # --- One page

    def _lease(self, holder: str, count: int, service: ServiceClass, kind: Kind) -> tuple[int, ...]:
        pages = []
        for _ in range(count):
            pages.append(page := self._take_to_compress() if kind is Kind.KV_INT8 else self._take(kind))
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
        """Nobody has it any more."""
        if page in self._names:
            self._lru(page).add(page)
            self._free.rest(page)
        else:
            self._free_up(page)

    def _free_up(self, page: int) -> None:
        self._incompressible.discard(page)
        self._free.give(page)

    def _take(self, kind: Kind) -> int:
        page = self._free.take(kind)
        if page is None:
            self._evict([self._idle[kind].pop()] if self._idle[kind] else self._idle_in(self._free.idle_for(kind)))
            page = self._free.take(kind)
        assert page is not None, "there were enough of this kind, free or idle"
        return page

    def _take_to_compress(self) -> int:
        """Of an extent in use; else of a new one beside the reserve; else what is idle goes."""
        kind = Kind.KV_INT8
        page = self._free.take_begun(kind, self._may_fill)
        if page is None and self._num_to_begin:
            page = self._free.take(kind)
        if page is None and (idle := self._idle_in_use(kind)) is not None:
            self._evict([idle])
            page = self._free.take_begun(kind, self._may_fill)
        return self._take(kind) if page is None else page

    def _idle_in_use(self, kind: Kind) -> int | None:
        """The first to go of the idle pages in begun extents."""
        for page in self._idle[kind]:
            extent = self.extents.place(page)[0]
            if self._free.is_begun(extent) and self._may_fill(extent):
                self._idle[kind].forget(page)
                return page
        return None

    def _evict(self, idle: Iterable[int]) -> None:
        for page in idle:
            del self._named[self._names.pop(page)]
            self._free.wake(page)
            self._free_up(page)

    def _idle_in(self, pages: range) -> list[int]:
        return [page for page in pages if self._lru(page).forget(page)]

    def _lru(self, page: int) -> SegmentedLru:
        return self._idle[self.extents.kind_of(page)]

    def _end_lease(self, holder: str, pages: Sequence[int], service: ServiceClass | None = None) -> None:
        """All or nothing: where one page is not the holder's, or not for this class, nothing has changed."""
        leased = self._leases.get(holder, {})
        ending = set(pages)
        if foreign := sorted(ending - leased.keys()):
            raise LeaseError(f"pages {foreign} are not leased to {holder}")
        # Real-time requests may use what is none of the reserve, too.
        if others := sorted(page for page in ending if service is ServiceClass.BE and leased[page] is not service):
            raise LeaseError(f"pages {others} are leased to {holder} for real-time requests only")
        if len(ending) < len(pages):
            raise LeaseError(f"{holder} names a page twice: {list(pages)}")
        for page in ending:
            if leased.pop(page) is ServiceClass.BE:
                self._best_effort.lose(page)
        if not leased:
            self._leases.pop(holder, None)
