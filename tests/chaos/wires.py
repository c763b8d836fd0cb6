"""Wires that lose, delay and spoil what they carry, for a deployment's links alone (wires.c)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.absent import preloadable

_SOURCE = Path(__file__).with_name("wires.c")
_FIELDS = struct.Struct("=5q")  # as in wires.c


class Wires:
    """The wires over which processes that have `environment` read from each other."""

    def __init__(self, folder: Path) -> None:
        library, self._file = preloadable(_SOURCE, folder, "no wire spoils what it carries"), folder / "wires"
        self._file.write_bytes(bytes(_FIELDS.size))
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "CHAOS_WIRES": str(self._file)}

    @contextmanager
    def bad(self, victim: int, delay_s: float = 0.0, flips: int = 0, breaks: int = 0) -> Iterator[None]:
        """During the block let what this process reads come late, flip a bit in some reads, and break off at others."""
        self._tell(victim, int(delay_s * 1e9), flips, breaks)
        try:
            yield
        finally:
            self._tell(0, 0, 0, 0)

    @property
    def num_hurt(self) -> int:
        """The reads that were spoilt or broken since the start."""
        return int(_FIELDS.unpack(self._file.read_bytes())[-1])

    def _tell(self, *fields: int) -> None:
        with self._file.open("r+b", buffering=0) as file:  # in place: processes have it mapped
            os.pwrite(file.fileno(), struct.pack("=4q", *fields), 0)
