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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import takewhile, zip_longest

from alignedserve.core import ServiceClass, Usage
from alignedserve.errors import LeaseError
from alignedserve.scheduling.segmented_lru import PROTECTED_SHARE, EvictedNames, SegmentedLru

_NO_ENTRIES: Mapping[str, ServiceClass] = {}


class Holders:
    """The entries that have each page, and how many pages each class has."""

    def __init__(self) -> None:
        self._entries: dict[int, dict[str, ServiceClass]] = {}  # page -> its entries; never empty
        self._num_best_effort: dict[int, int] = {}  # page -> number of its best-effort entries; never 0
        self.num_shared = 0  # pages that entries of both classes have

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __contains__(self, page: int) -> bool:
        return page in self._entries

    @property
    def num_best_effort(self) -> int:
        """Return how many pages a best-effort entry has."""
        return len(self._num_best_effort)

    def entries_of(self, page: int) -> Mapping[str, ServiceClass]:
        return self._entries.get(page, _NO_ENTRIES)

    def add(self, page: int, entry: str, service: ServiceClass) -> None:
        self.num_shared -= self._is_shared(page)
        self._entries.setdefault(page, {})[entry] = service
        if service is ServiceClass.BE:
            self._num_best_effort[page] = self._num_best_effort.get(page, 0) + 1
        self.num_shared += self._is_shared(page)

    def remove(self, page: int, entry: str) -> None:
        self.num_shared -= self._is_shared(page)
        holding = self._entries[page]
        if holding.pop(entry) is ServiceClass.BE:
            self._num_best_effort[page] -= 1
            if not self._num_best_effort[page]:
                del self._num_best_effort[page]
        if not holding:
            del self._entries[page]
        self.num_shared += self._is_shared(page)

    def move(self, page: int, into: int) -> None:
        """Give all entries of the page another page instead, which no entry has yet."""
        self._entries[into] = self._entries.pop(page)
        if page in self._num_best_effort:
            self._num_best_effort[into] = self._num_best_effort.pop(page)

    def _is_shared(self, page: int) -> bool:
        return 0 < self._num_best_effort.get(page, 0) < len(self._entries.get(page, _NO_ENTRIES))


class FreePages:
    """The free pages: the lowest number is taken first, so that the pages in use lie together."""

    def __init__(self, num_pages: int) -> None:
        self._heap = list(range(num_pages))

    def __iter__(self) -> Iterator[int]:
        return iter(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def take(self) -> int | None:
        return heappop(self._heap) if self._heap else None

    def give(self, page: int) -> None:
        """Make a taken page free."""
        heappush(self._heap, page)

    def rest(self, page: int) -> None:
        """Note that a taken page is idle from now on."""

    def wake(self, page: int) -> None:
        """Note that an idle page is taken again."""


class Pages:
    def __init__(self, num_pages: int, free: FreePages | None = None) -> None:
        """Start with free pages."""
        self.num_pages = num_pages
        self._free = free or FreePages(num_pages)
        self._leases: dict[str, set[int]] = {}  # holder -> its pages, never empty
        self._entries: dict[str, list[int]] = {}  # entry -> its pages, in the order of its tokens
        self._classes: dict[str, ServiceClass] = {}  # entry -> class
        self._holders = Holders()
        self._named: dict[int, int] = {}  # name (hash of its tokens and all before) -> page
        self._names: dict[int, int] = {}  # page -> its name
        self._idle = SegmentedLru(int(num_pages * PROTECTED_SHARE))
        self._evicted = EvictedNames(num_pages)

    @property
    def num_free(self) -> int:
        """Return how many pages a lease may take; idle pages count as free."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_leased(self) -> int:
        return sum(map(len, self._leases.values()))

    @property
    def num_stored(self) -> int:
        """Return how many pages entries have; a shared page counts once."""
        return len(self._holders)

    @property
    def usage(self) -> Usage:
        held = self._holders
        rt, be = len(held) - held.num_best_effort, held.num_best_effort - held.num_shared
        return Usage(rt, be, held.num_shared, self.num_idle, self.num_leased, len(self._free))

    @property
    def numbers(self) -> list[int]:
        """Return the pages that are free, idle, leased or held; each page must come once."""
        leased = (page for pages in self._leases.values() for page in pages)
        return [*self._free, *self._idle, *leased, *self._holders]

    @property
    def all_numbers(self) -> list[int]:
        """Return the pages that `numbers` must have."""
        return list(range(self.num_pages))

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

    def lease(self, holder: str, count: int) -> tuple[int, ...] | None:
        """Lease `count` more pages to the holder; None where fewer are free."""
        if count < 0:
            raise ValueError(f"cannot lease {count} pages")
        return self._lease(holder, [self._take() for _ in range(count)]) if count <= self.num_free else None

    def adopt(
        self,
        holder: str,
        pages: Sequence[int],
        entry: str,
        names: Sequence[int] = (),
        service: ServiceClass = ServiceClass.RT,
    ) -> None:
        """Give pages of the holder's lease to the entry of this class, after the pages that it has.

        The first of them are full, and have these names. Where the pool has a page of that name already, that page
        takes the place of the new one, which becomes free.
        """
        self._end_lease(holder, pages)
        held = self._entries.setdefault(entry, [])
        self._classes[entry] = service
        for page, name in zip_longest(pages, names[: len(pages)]):
            known = None if name is None else self._named.get(name)
            if known is not None:
                self._free.give(page)
                page = known
                self._use_again(page)
            elif name is not None:
                self._named[name], self._names[page] = page, name
                if self._evicted.has_back(name):
                    self._lru(page).again(page)
            held.append(page)
            self._holders.add(page, entry, service)

    def hold(self, entry: str, names: Sequence[int], service: ServiceClass = ServiceClass.RT) -> tuple[int, ...]:
        """Give the pages of the longest known prefix to the entry, which has none yet."""
        if entry in self._entries:
            raise LeaseError(f"entry {entry} has pages already")
        pages = [self._named[name] for name in takewhile(self._named.__contains__, names)]
        for page in pages:
            self._use_again(page)
            self._holders.add(page, entry, service)
        if pages:
            self._entries[entry], self._classes[entry] = pages, service
        return tuple(pages)

    def give_back(self, holder: str, pages: Sequence[int]) -> None:
        self._end_lease(holder, pages)
        for page in pages:
            self._free.give(page)

    def keep_only(self, holder: str, kept: Sequence[int]) -> None:
        """Free what the holder has leased beyond these pages: it will not write there."""
        self.give_back(holder, sorted(self.leased_to(holder) - set(kept)))

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
        pages = sorted(self.leased_to(holder))
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

    # --- One page

    def _lease(self, holder: str, pages: Sequence[int]) -> tuple[int, ...]:
        if pages:
            self._leases.setdefault(holder, set()).update(pages)
        return tuple(pages)

    def _use_again(self, page: int) -> None:
        if self._lru(page).again(page):
            self._free.wake(page)

    def _let_go(self, page: int, entry: str) -> None:
        self._holders.remove(page, entry)
        if page not in self._holders:
            self._put_down(page)

    def _put_down(self, page: int) -> None:
        """Make the page idle, or free: no entry has it any more."""
        if page in self._names:
            self._lru(page).add(page)
            self._free.rest(page)
        else:
            self._free_up(page)

    def _free_up(self, page: int) -> None:
        self._free.give(page)

    def _take(self) -> int:
        if not len(self._free):
            self._evict(self._idle.pop())
        page = self._free.take()
        assert page is not None, "there were enough pages, free or idle"
        return page

    def _evict(self, page: int) -> None:
        """Make an idle page free, which loses its name."""
        name = self._names.pop(page)
        del self._named[name]
        self._evicted.note(name)
        self._free.wake(page)
        self._free_up(page)

    def _lru(self, page: int) -> SegmentedLru:
        """Return the list that keeps this page while it is idle."""
        return self._idle

    def _end_lease(self, holder: str, pages: Sequence[int]) -> None:
        """End the lease of these pages; nothing changes where one is not the holder's."""
        leased, ending = self._leases.get(holder, set()), set(pages)
        if foreign := sorted(ending - leased):
            raise LeaseError(f"pages {foreign} are not leased to {holder}")
        if len(ending) < len(pages):
            raise LeaseError(f"{holder} names a page twice: {list(pages)}")
        leased -= ending
        if not leased:
            self._leases.pop(holder, None)
