"""The entries that have each page, and how many pages each class has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alignedserve.core import ServiceClass

_NO_ENTRIES: Mapping[str, ServiceClass] = {}


class Holders:
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
