"""The processes of a deployment's parts: which of them may be hurt now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.end_to_end.deployment import part_of

Processes = Callable[[], dict[int, str]]  # pid -> command line
ROLES = ("router", "pool", "prefill", "decode", "gateway", "jobs")


def role_of(part: str) -> str:
    return part.partition("-")[0]


class Parts:
    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.note: Callable[[str], None] = lambda _: None  # is told the name of a part that is hurt now
        self._spared: set[int] = set()

    def choose(self, draw: Random, roles: Collection[str] = ROLES) -> tuple[str, int] | None:
        """Return the name and the pid of a part that has a process now, however young that is; None without any."""
        found = sorted((part, pid) for pid, part in self.running().items() if self._may_be(part, pid, roles))
        if not found:
            return None
        part, pid = draw.choice(found)
        self.note(part)
        return part, pid

    def running(self) -> dict[int, str]:
        """Return the pid and the name of each part that has a process now."""
        named = {pid: part_of(command) for pid, command in self._processes().items()}
        return {pid: part for pid, part in named.items() if part is not None}

    def servers(self, programs: Collection[str]) -> dict[int, str]:
        """Return the pid and the name of each process that runs one of these programs."""
        named = {pid: Path(command.split()[0]).name for pid, command in self._processes().items()}
        return {pid: name for pid, name in named.items() if name in programs}

    def _may_be(self, part: str, pid: int, roles: Collection[str]) -> bool:
        return role_of(part) in roles and pid not in self._spared

    @contextmanager
    def spared(self, pid: int) -> Iterator[None]:
        """Choose this process for nothing else during the block."""
        self._spared.add(pid)
        try:
            yield
        finally:
            self._spared.discard(pid)
