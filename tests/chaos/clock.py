"""A wall clock that steps while a deployment runs, for the deployment's processes alone.

The machine's own clock is left as it is, and time namespaces cannot move the wall clock. So a small library (clock.c)
is compiled here and preloaded, and adds what a shared file says. Monotonic clocks are not touched.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.absent import preloadable

_SOURCE = Path(__file__).with_name("clock.c")
_OFFSET = struct.Struct("=q")


class WallClock:
    """The wall clock of all processes that have `environment`."""

    def __init__(self, folder: Path) -> None:
        library, self._file = preloadable(_SOURCE, folder, "clocks do not step"), folder / "clock"
        self.offset_s, self.turn = 0, asyncio.Lock()
        self._file.write_bytes(_OFFSET.pack(0))
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def step(self, by_s: int) -> None:
        self.offset_s += by_s
        with self._file.open("r+b", buffering=0) as file:  # in place: processes have it mapped
            os.pwrite(file.fileno(), _OFFSET.pack(self.offset_s), 0)
