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
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile, zip_longest

from alignedserve.errors import LeaseError

_HASH_BYTES = 8
PROTECTED_SHARE = 0.8  # of all pages


def chained_hashes(tokens: Sequence[int], page_size: int, root: bytes = b"") -> tuple[int, ...]:
    """One hash per page of its tokens and all those before; the last page may be partial.

    The same in every process and on every machine. Only what has the same root has the same hashes.
    """
    digests = []
    before = root
    packed, page_bytes = struct.pack(f"<{len(tokens)}I", *tokens), 4 * page_size
    for start in range(0, len(packed), page_bytes):
        before = blake2b(before + packed[start : start + page_bytes], digest_size=_HASH_BYTES).digest()
        digests.append(before)
    return struct.unpack(f"<{len(digests)}Q", b"".join(digests))


def more_hashes(hashes: tuple[int, ...], tokens: Sequence[int], page_size: int, root: bytes) -> tuple[int, ...]:
    """The hashes of full pages, and those of the pages after them that `tokens` fill."""
    before = hashes[-1].to_bytes(_HASH_BYTES, "little") if hashes else root
    return hashes + chained_hashes(tokens, page_size, before)


class Pages:
    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))[::-1]  # taken from the end: what was used last is warm
        self._leases: dict[str, set[int]] = {}  # holder -> pages, never empty
        self._entries: dict[str, list[int]] = {}  # entry -> pages, in the order of its tokens
        self._num_holding: dict[int, int] = {}  # page -> entries that have it; never 0
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
        return len(self._num_holding)

    @property
    def numbers(self) -> list[int]:
        """Free, idle, leased or held: each page once, as long as all is well."""
        leased = (page for pages in self._leases.values() for page in pages)
        return [*self._free, *self._idle, *leased, *self._num_holding]

    @property
    def entries(self) -> set[str]:
        return set(self._entries)

    def of(self, entry: str) -> tuple[int, ...]:
        return tuple(self._entries.get(entry, ()))

    def leased_to(self, holder: str) -> frozenset[int]:
        return frozenset(self._leases.get(holder, ()))

    def lease(self, holder: str, count: int) -> tuple[int, ...] | None:
        """So many free pages for the holder to write to, in addition to what it has; None where there are fewer."""
        if count < 0:
            raise ValueError(f"cannot lease {count} pages")
        if count > self.num_free:
            return None
        pages = tuple(self._free.pop() if self._free else self._evict() for _ in range(count))
        if pages:
            self._leases.setdefault(holder, set()).update(pages)
        return pages

    def adopt(self, holder: str, pages: Sequence[int], entry: str, names: Sequence[int] = ()) -> None:
        """Pages of the holder's lease become the entry's, after those that it already has.

        The first of them are full, and `names` are the hashes of their tokens. Where another entry has stored the same
        tokens before, that page takes the place of the new one, which is free.
        """
        self._end_lease(holder, pages)
        held = self._entries.setdefault(entry, [])
        for page, name in zip_longest(pages, names[: len(pages)]):
            known = None if name is None else self._named.get(name)
            if known is not None:
                self._free.append(page)
                page = known
                self._idle.discard(page)
            elif name is not None:
                self._named[name], self._names[page] = page, name
            held.append(page)
            self._num_holding[page] = self._num_holding.get(page, 0) + 1

    def hold(self, entry: str, names: Sequence[int]) -> tuple[int, ...]:
        """The pages of the longest known beginning become the entry's, which has none yet."""
        if entry in self._entries:
            raise LeaseError(f"entry {entry} has pages already")
        pages = [self._named[name] for name in takewhile(self._named.__contains__, names)]
        for page in pages:
            self._idle.again(page)
            self._num_holding[page] = self._num_holding.get(page, 0) + 1
        if pages:
            self._entries[entry] = pages
        return tuple(pages)

    def give_back(self, holder: str, pages: Sequence[int]) -> None:
        self._end_lease(holder, pages)
        self._free.extend(pages)

    def keep_only(self, holder: str, kept: Sequence[int]) -> None:
        """What the holder has leased beyond these is free: it has said that it will not write there."""
        leased = self._leases.get(holder, set())
        self.give_back(holder, sorted(leased - set(kept)))

    def shorten(self, entry: str, count: int) -> None:
        """The entry has only its first `count` pages from now on, perhaps none until it adopts others."""
        held = self._entries[entry]
        for page in reversed(held[count:]):
            self._let_go(page)
        del held[count:]

    def free_entry(self, entry: str) -> None:
        if entry not in self._entries:
            raise LeaseError(f"entry {entry} has no pages")
        # From its end on: a page is of use only together with those before it, so those shall stay longer.
        for page in reversed(self._entries.pop(entry)):
            self._let_go(page)

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

    def _let_go(self, page: int) -> None:
        self._num_holding[page] -= 1
        if not self._num_holding[page]:
            del self._num_holding[page]
            if page in self._names:
                self._idle.add(page)
            else:
                self._free.append(page)

    def _evict(self) -> int:
        page = self._idle.pop()
        del self._named[self._names.pop(page)]
        return page

    def _end_lease(self, holder: str, pages: Sequence[int]) -> None:
        """All or nothing: where one page is not the holder's, nothing has changed."""
        leased = self._leases.get(holder, set())
        ending = set(pages)
        if foreign := sorted(ending - leased):
            raise LeaseError(f"pages {foreign} are not leased to {holder}")
        if len(ending) < len(pages):
            raise LeaseError(f"{holder} names a page twice: {list(pages)}")
        leased -= ending
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
