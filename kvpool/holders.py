"""Which entries have which page, and how many pages each class has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alignedserve.core import ServiceClass

_NOBODY: Mapping[str, ServiceClass] = {}


class Holders:
    def __init__(self) -> None:
        self._of: dict[int, dict[str, ServiceClass]] = {}  # page -> entries that have it; never none
        self._num_best_effort: dict[int, int] = {}  # page -> best-effort entries that have it; never 0
        self.num_shared = 0  # pages that entries of both classes have

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def __contains__(self, page: int) -> bool:
        return page in self._of

    @property
    def num_best_effort(self) -> int:
        """Pages that some best-effort entry has."""
        return len(self._num_best_effort)

    def of(self, page: int) -> Mapping[str, ServiceClass]:
        return self._of.get(page, _NOBODY)

    def has_best_effort(self, page: int) -> bool:
        return page in self._num_best_effort

    def add(self, page: int, entry: str, service: ServiceClass) -> bool:
        """Whether this is the first best-effort entry that has the page."""
        self.num_shared -= self._is_shared(page)
        self._of.setdefault(page, {})[entry] = service
        best_effort = self._num_best_effort.get(page, 0)
        if service is ServiceClass.BE:
            self._num_best_effort[page] = best_effort + 1
        self.num_shared += self._is_shared(page)
        return service is ServiceClass.BE and not best_effort

    def remove(self, page: int, entry: str) -> bool:
        """Whether it was the last best-effort entry that had the page."""
        self.num_shared -= self._is_shared(page)
        holding, was_last = self._of[page], False
        if holding.pop(entry) is ServiceClass.BE:
            self._num_best_effort[page] -= 1
            if was_last := not self._num_best_effort[page]:
                del self._num_best_effort[page]
        if not holding:
            del self._of[page]
        self.num_shared += self._is_shared(page)
        return was_last

    def move(self, page: int, into: int) -> None:
        """All who have the page have another instead, which nobody has yet."""
        self._of[into] = self._of.pop(page)
        if page in self._num_best_effort:
            self._num_best_effort[into] = self._num_best_effort.pop(page)

    def _is_shared(self, page: int) -> bool:
        return 0 < self._num_best_effort.get(page, 0) < len(self._of.get(page, _NOBODY))
