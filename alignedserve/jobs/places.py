"""The places in a file of the lines that must still run: 16 bytes for each, since every open job holds all of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from alignedserve.jobs.lines import RawLine


class LinePlaces:
    def __init__(self) -> None:
        self._lines, self._offsets, self._sizes = array("I"), array("Q"), array("I")

    @classmethod
    def from_lines(cls, lines: Iterable[RawLine]) -> LinePlaces:
        """Return the places of these lines, which come in the order of their numbers."""
        places = cls()
        for line in lines:
            places._lines.append(line.number)
            places._offsets.append(line.offset)
            places._sizes.append(len(line.data))
        return places

    @property
    def lines(self) -> Sequence[int]:
        return self._lines

    def find(self, number: int) -> tuple[int, int]:
        """Return a line's offset and size in bytes; raise LookupError if the line has no place."""
        at = bisect_left(self._lines, number)
        if at == len(self._lines) or self._lines[at] != number:
            raise LookupError(f"line {number} has no place")
        return self._offsets[at], self._sizes[at]
