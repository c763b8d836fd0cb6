"""Who owns which page of the arena: page numbers only, the bytes are the workers' business.

                lease                    adopt
       free ───────────▶ leased to a ───────────▶ an entry's
        ▲                   holder                    │
        ├── give_back, ───────┘                       │
        │   holder_gone                               │
        └──────────────────────────────── free_entry ─┘

A lease has no time limit: it ends when its holder gives it back, hands it on, or is gone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from alignedserve.errors import LeaseError

_HASH_BYTES = 8


def chained_hashes(tokens: Sequence[int], page_size: int) -> tuple[int, ...]:
    """One hash per page of its tokens and all those before; the last page may be partial.

    The same in every process and on every machine.
    """
    hashes = []
    before = b""
    for start in range(0, len(tokens), page_size):
        page = tokens[start : start + page_size]
        before = blake2b(before + struct.pack(f"<{len(page)}I", *page), digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(before, "little"))
    return tuple(hashes)


class Pages:
    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))[::-1]  # taken from the end: what was used last is warm
        self._leases: dict[str, set[int]] = {}  # holder -> pages, never empty
        self._entries: dict[str, list[int]] = {}  # entry -> pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        return sum(map(len, self._leases.values()))

    @property
    def num_stored(self) -> int:
        """Of the entries."""
        return sum(map(len, self._entries.values()))

    @property
    def numbers(self) -> list[int]:
        """Free, leased or an entry's: each page once, as long as all is well."""
        taken = [*self._leases.values(), *self._entries.values()]
        return [*self._free, *(page for pages in taken for page in pages)]

    @property
    def entries(self) -> set[str]:
        return set(self._entries)

    def leased_to(self, holder: str) -> frozenset[int]:
        return frozenset(self._leases.get(holder, ()))

    def lease(self, holder: str, count: int) -> tuple[int, ...] | None:
        """So many free pages for the holder to write to, in addition to what it has; None where there are fewer."""
        if count < 0:
            raise ValueError(f"cannot lease {count} pages")
        if count > self.num_free:
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        if pages:
            self._leases.setdefault(holder, set()).update(pages)
        return pages

    def adopt(self, holder: str, pages: Sequence[int], entry: str) -> None:
        """Pages of the holder's lease become the entry's, after those that it already has."""
        self._end_lease(holder, pages)
        self._entries.setdefault(entry, []).extend(pages)

    def give_back(self, holder: str, pages: Sequence[int]) -> None:
        self._end_lease(holder, pages)
        self._free.extend(pages)

    def keep_only(self, holder: str, kept: Sequence[int]) -> None:
        """What the holder has leased beyond these is free: it has said that it will not write there."""
        leased = self._leases.get(holder, set())
        self.give_back(holder, sorted(leased - set(kept)))

    def free_entry(self, entry: str) -> None:
        if entry not in self._entries:
            raise LeaseError(f"entry {entry} has no pages")
        self._free.extend(self._entries.pop(entry))

    def holder_gone(self, holder: str) -> int:
        """Frees what the holder has leased, and says how many pages that were. Its process must be dead."""
        pages = sorted(self._leases.pop(holder, ()))
        self._free.extend(pages)
        return len(pages)

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
