"""Where the lines of a file are that still have to run: 16 bytes for each, as every open job has all of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from alignedserve.jobs.lines import Raw


class Places:
    def __init__(self) -> None:
        self._lines, self._offsets, self._sizes = array("I"), array("Q"), array("I")

    @classmethod
    def of(cls, raws: Iterable[Raw]) -> Places:
        """In the order of their numbers."""
        places = cls()
        for raw in raws:
            places._lines.append(raw.number)
            places._offsets.append(raw.offset)
            places._sizes.append(len(raw.data))
        return places

    @property
    def lines(self) -> Sequence[int]:
        return self._lines

    def of_line(self, number: int) -> tuple[int, int]:
        """Offset and bytes; LookupError where it is not among them."""
        at = bisect_left(self._lines, number)
        if at == len(self._lines) or self._lines[at] != number:
            raise LookupError(f"line {number} has no place")
        return self._offsets[at], self._sizes[at]
