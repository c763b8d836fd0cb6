"""The clock of every process: seconds that never jump, whatever happens to the wall clock.

The launcher reads the wall clock once, and its parts go on from there by the steady clock of the machine. So parts that
start before and after a step of the wall clock agree on the time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ClockOrigin:
    """The instant at which a machine's steady clock began, by the wall clock as it was read once."""

    boot: str  # the machine, since its last start
    began_at: float  # seconds since 1970

    @classmethod
    def read(cls) -> ClockOrigin:
        return cls(_BOOT.read_text().strip(), time.time() - time.monotonic())


class Clock:
    """Seconds since 1970 that never jump; processes with the same origin can compare them.

    On another machine than the origin's, the clock goes on from that machine's wall clock as the process starts.
    """

    def __init__(self, origin: ClockOrigin) -> None:
        own = ClockOrigin.read()
        self._began_at = (origin if origin.boot == own.boot else own).began_at

    def now(self) -> float:
        return self._began_at + time.monotonic()

    def until(self, at: float) -> float:
        """Return the seconds from now until `at`: zero or less when `at` has passed."""
        return at - self.now()
