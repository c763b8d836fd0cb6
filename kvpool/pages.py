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

Leases and entries have a class. Some pages are reserved for real-time ones: what is leased to, or held by, somebody
best-effort is never more than all but these, and best-effort takes nothing that would leave fewer than so many free. A
page that both classes hold counts as best-effort, since it will be when the real-time one has gone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile, zip_longest

from alignedserve.core import ServiceClass, Usage
from alignedserve.errors import LeaseError

_HASH_BYTES = 8
_OTHER = {ServiceClass.RT: ServiceClass.BE, ServiceClass.BE: ServiceClass.RT}
PROTECTED_SHARE = 0.8  # of all pages


def chained_hashes(tokens: Sequence[int], page_size: int, root: bytes = b"") -> tuple[int, ...]:
    """One hash per page of its tokens and all those before; the last page may be partial.

    The same in every process and on every machine. Only what has the same root has the same hashes.
    """
    hashes = []
    before = root
    for start in range(0, len(tokens), page_size):
        page = tokens[start : start + page_size]
        before = blake2b(before + struct.pack(f"<{len(page)}I", *page), digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(before, "little"))
    return tuple(hashes)


class Pages:
    def __init__(self, num_pages: int, num_reserved: int = 0) -> None:
        """So many of them are reserved for real-time requests."""
        self._num_reserved = num_reserved
        self._free = list(range(num_pages))[::-1]  # taken from the end: what was used last is warm
        self._leases: dict[str, dict[int, ServiceClass]] = {}  # holder -> pages and what for, never empty
        self._entries: dict[str, list[int]] = {}  # entry -> pages, in the order of its tokens
        self._classes: dict[str, ServiceClass] = {}  # of the entries
        # page -> entries of this class that have it, never 0
        self._holding: dict[ServiceClass, dict[int, int]] = {service: {} for service in ServiceClass}
        self._num_shared = 0  # pages that entries of both classes have
        self._named: dict[int, int] = {}  # hash of its tokens and all before -> page
        self._names: dict[int, int] = {}  # page -> its hash
        self._idle = SegmentedLru(int(num_pages * PROTECTED_SHARE))

    @property
    def num_free(self) -> int:
        """That a lease may take: idle ones are as good as free."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_leased(self) -> int:
        return sum(map(len, self._leases.values()))

    @property
    def num_stored(self) -> int:
        """Of the entries; a page that several share counts once."""
        return sum(map(len, self._holding.values())) - self._num_shared

    @property
    def num_best_effort(self) -> int:
        """Leased for best-effort requests, or held by one: never of the reserve."""
        leased = sum(service is ServiceClass.BE for pages in self._leases.values() for service in pages.values())
        return leased + len(self._holding[ServiceClass.BE])

    @property
    def usage(self) -> Usage:
        rt, be = (len(self._holding[one]) - self._num_shared for one in (ServiceClass.RT, ServiceClass.BE))
        return Usage(rt, be, self._num_shared, self.num_idle, self.num_leased, len(self._free))

    @property
    def numbers(self) -> list[int]:
        """Free, idle, leased or held: each page once, as long as all is well."""
        leased = (page for pages in self._leases.values() for page in pages)
        held = {page for holding in self._holding.values() for page in holding}
        return [*self._free, *self._idle, *leased, *held]

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
        room = self._room(service)
        if count > room:
            return None
        pages = tuple(self._free.pop() if self._free else self._evict() for _ in range(max(count, min(most, room))))
        if pages:
            self._leases.setdefault(holder, {}).update(dict.fromkeys(pages, service))
        return pages

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
            if known is not None:
                self._free.append(page)
                page = known
                self._idle.discard(page)
            elif name is not None:
                self._named[name], self._names[page] = page, name
            held.append(page)
            self._take(page, service)

    def hold(self, entry: str, names: Sequence[int], service: ServiceClass = ServiceClass.RT) -> tuple[int, ...]:
        """The pages of the longest known beginning become the entry's, which has none yet.

        Of a best-effort one, as far as it takes nothing of the reserve: pages that only real-time ones have count, too.
        """
        if entry in self._entries:
            raise LeaseError(f"entry {entry} has pages already")
        known = (self._named[name] for name in takewhile(self._named.__contains__, names))
        pages = list(known if service is ServiceClass.RT else self._beyond_reserve(known))
        for page in pages:
            self._idle.again(page)
            self._take(page, service)
        if pages:
            self._entries[entry], self._classes[entry] = pages, service
        return tuple(pages)

    def give_back(self, holder: str, pages: Sequence[int]) -> None:
        self._end_lease(holder, pages)
        self._free.extend(pages)

    def keep_only(self, holder: str, kept: Sequence[int], service: ServiceClass = ServiceClass.RT) -> None:
        """What the holder has leased for this class beyond these is free: it has said that it will not write there."""
        leased = {page for page, of in self._leases.get(holder, {}).items() if of is service}
        self.give_back(holder, sorted(leased - set(kept)))

    def free_entry(self, entry: str) -> None:
        if entry not in self._entries:
            raise LeaseError(f"entry {entry} has no pages")
        service = self._classes.pop(entry)
        # From its end on: a page is of use only together with those before it, so those shall stay longer.
        for page in reversed(self._entries.pop(entry)):
            self._let_go(page, service)

    def holder_gone(self, holder: str) -> int:
        """Frees what the holder has leased, and says how many pages that were. Its process must be dead."""
        pages = sorted(self._leases.pop(holder, ()))
        self._free.extend(pages)
        return len(pages)

    def forget(self, page: int) -> None:
        """It does not hold what its name says: nobody is to get it any more."""
        name = self._names.pop(page, None)
        if name is not None:
            del self._named[name]
            if self._idle.forget(page):
                self._free.append(page)

    def _room(self, service: ServiceClass) -> int:
        """Pages that somebody of this class may take now."""
        return self.num_free if service is ServiceClass.RT else max(0, self.num_free - self._num_reserved)

    def _beyond_reserve(self, pages: Iterator[int]) -> Iterator[int]:
        """The first of them, as many as somebody best-effort may hold."""
        be = self._holding[ServiceClass.BE]
        room = self._room(ServiceClass.BE)
        for page in pages:
            room -= page not in be
            if room < 0:
                return
            yield page

    def _take(self, page: int, service: ServiceClass) -> None:
        holding, others = self._holding[service], self._holding[_OTHER[service]]
        self._num_shared += page not in holding and page in others
        holding[page] = holding.get(page, 0) + 1

    def _let_go(self, page: int, service: ServiceClass) -> None:
        holding, others = self._holding[service], self._holding[_OTHER[service]]
        holding[page] -= 1
        if holding[page]:
            return
        del holding[page]
        if page in others:
            self._num_shared -= 1
        elif page in self._names:
            self._idle.add(page)
        else:
            self._free.append(page)

    def _evict(self) -> int:
        page = self._idle.pop()
        del self._named[self._names.pop(page)]
        return page

    def _end_lease(self, holder: str, pages: Sequence[int], service: ServiceClass | None = None) -> None:
        """All or nothing: where one page is not the holder's, or not for this class, nothing has changed."""
        leased = self._leases.get(holder, {})
        ending = set(pages)
        if foreign := sorted(ending - leased.keys()):
            raise LeaseError(f"pages {foreign} are not leased to {holder}")
        if others := sorted(page for page in ending if service not in (None, leased[page])):
            raise LeaseError(f"pages {others} are not leased to {holder} for class {service and service.value}")
        if len(ending) < len(pages):
            raise LeaseError(f"{holder} names a page twice: {list(pages)}")
        for page in ending:
            del leased[page]
        if not leased:
            self._leases.pop(holder, None)


class SegmentedLru:
    """Idle pages, the next to be evicted first: those on probation, then the protected; each by when it became idle.

    A page is protected once it was held again. Of the protected only so many are kept: beyond that, the one that has
    been idle longest goes back on probation.
    """

    def __init__(self, most_protected: int) -> None:
        self._most_protected = most_protected
        self._probation: dict[int, None] = {}
        self._protected: dict[int, None] = {}
        self._returning: set[int] = set()  # held again now, protected when idle next

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        yield from self._probation
        yield from self._protected

    def add(self, page: int) -> None:
        if page not in self._returning:
            self._probation[page] = None
            return
        self._returning.discard(page)
        self._protected[page] = None
        if len(self._protected) > self._most_protected:
            oldest = next(iter(self._protected))
            del self._protected[oldest]
            self._probation[oldest] = None

    def again(self, page: int) -> None:
        """Somebody has come back for it."""
        self.discard(page)
        self._returning.add(page)

    def forget(self, page: int) -> bool:
        """Nobody will come back for it. Whether it was idle."""
        self._returning.discard(page)
        return self.discard(page)

    def discard(self, page: int) -> bool:
        """Whether it was idle."""
        for segment in (self._probation, self._protected):
            if page in segment:
                del segment[page]
                return True
        return False

    def pop(self) -> int:
        segment = self._probation or self._protected
        page = next(iter(segment))
        del segment[page]
        return page
