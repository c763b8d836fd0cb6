"""Signs of life of a part that starts: what it does, and how far it is; and the exit codes of one that ends. Only the
standard library is imported here.

Code that does long work of a start says so through `Signs`, in pieces where the work has pieces. A process sends its
newest sign to the launcher (shell/signs.py), which shows the slowest part and ends one that stands still
(launch/starts.py). A heartbeat is no such sign: its thread also beats while a load hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol


class ExitCode(IntEnum):
    """An exit code of a part's process. The launcher, if it still runs, starts the part again after all but STOPPED and
    USER_ERROR."""

    STOPPED = 0
    BROKEN = 1  # an error that was not expected: Python itself ends with this code
    USER_ERROR = 2  # starting the part again would not help
    LAUNCHER_GONE = 3
    CAST_OUT = 4
    RANK_LOST = 5
    DEVICE_LOST = 6
    WORK_HUNG = 7


class Stage(Enum):
    """What a part does, in the order of a start."""

    PLACE = "waits for a place"
    MODEL = "fetches the model"
    LIBRARIES = "loads libraries"
    POOL = "makes the KV pool's memory"
    PLAIN = "waits for its turn to read the plain model"
    WEIGHTS = "reads weights"
    LAYERS = "tunes linear layers"
    ADAPTERS = "reads adapters"
    KERNELS = "tries kernels"
    RANKS = "waits for the other ranks"
    GRAPHS = "captures steps"
    TURN = "waits for its turn to measure steps"
    STEPS = "measures steps"
    RUNS = "runs"

    @property
    def waits(self) -> bool:
        """Return whether the part waits for others. A start that takes long takes long because of them."""
        return self in (Stage.PLACE, Stage.PLAIN, Stage.RANKS, Stage.TURN)

    @property
    def order(self) -> int:
        return list(Stage).index(self)


_IN_BYTES = (Stage.POOL, Stage.WEIGHTS)
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True)
class Sign:
    """What one life of a part does, and how much of it is done. A sign that differs from the one before is a sign of
    life."""

    part: str
    incarnation: int
    stage: Stage
    done: int = 0
    total: int = 0  # 0: unknown, or the stage has no pieces

    @property
    def share(self) -> float:
        """Return the share of the stage that is done; 0 where that is unknown."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def amount(self) -> str:
        """Return how far the stage is, such as "3.1 of 16.1 GB"; empty where no total is known."""
        if not self.total:
            return ""
        if self.stage not in _IN_BYTES:
            return f"{self.done} of {self.total}"
        size, unit = next((each for each in _UNITS if self.total >= each[0]), (1, "bytes"))
        return f"{self.done / size:.1f} of {self.total / size:.1f} {unit}"


class Signs(Protocol):
    """Hears what a part does as it starts. Any thread may call this, as often as it likes."""

    def stage(self, stage: Stage, total: int = 0) -> None:
        """Say that this stage begins; `total` is its amount of work, in bytes or pieces, where that is known."""

    def advance(self, done: int = 1) -> None:
        """Add these bytes or pieces to what is done of the stage."""


class _NoSigns:
    def stage(self, stage: Stage, total: int = 0) -> None: ...

    def advance(self, done: int = 1) -> None: ...


NO_SIGNS: Signs = _NoSigns()  # nobody hears


@contextmanager
def growing(signs: Signs, size: Callable[[], int], each_s: float = 1.0) -> Iterator[None]:
    """Say by how much `size` grows during one long call of a library, which says nothing itself.

    In the end all of that is taken back: the caller counts what the call has really made.
    """
    has_ended, first, told = threading.Event(), size(), 0

    def tell() -> None:
        nonlocal told
        while not has_ended.wait(each_s):
            if (grown := size() - first - told) > 0:
                told += grown
                signs.advance(grown)

    teller = threading.Thread(target=tell, name="growing", daemon=True)
    teller.start()
    try:
        yield
    finally:
        has_ended.set()
        teller.join()
        signs.advance(-told)
