"""A machine on which no process can begin for a while, for a deployment's processes alone (no_fork.c)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.absent import preloadable

_SOURCE = Path(__file__).with_name("no_fork.c")


class ProcessRoom:
    """The room for more processes, for all processes that have `environment`."""

    def __init__(self, folder: Path) -> None:
        self._full = folder / "full"
        library = preloadable(_SOURCE, folder, "processes can always begin")
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "CHAOS_NO_FORK": str(self._full)}

    @contextmanager
    def full(self) -> Iterator[None]:
        """Let no process begin during the block."""
        self._full.touch()
        try:
            yield
        finally:
            self._full.unlink()
