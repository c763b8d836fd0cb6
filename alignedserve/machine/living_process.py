"""A process, told from a later one that has its pid."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LivingProcess:
    """A process, for as long as it lives: another one may have its pid later."""

    pid: int
    began: int  # by the kernel's clock

    @classmethod
    def of(cls, pid: int) -> LivingProcess | None:
        """Return the process with this pid; None if it has ended."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def lives(self) -> bool:
        return LivingProcess.of(self.pid) == self
