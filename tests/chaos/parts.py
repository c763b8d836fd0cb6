"""The processes of a deployment's parts: which of them may be hurt now, and which were hurt when."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from random import Random

from alignedserve.launch.keeper import QUICK_DEATH_S
from tests.end_to_end.deployment import part_of

Processes = Callable[[], dict[int, str]]  # pid -> command line
ROLES = ("router", "pool", "prefill", "decode", "gateway", "jobs")
RESTED_S = QUICK_DEATH_S + 1.0
# A part that dies quickly three times in a row is away for up to half a minute. So that load goes on, a part is hurt
# soon after its start only once in a while, and not twice in a row.
_EARLY = 0.2


def role_of(part: str) -> str:
    return part.partition("-")[0]


def worker_of(part: str) -> str:
    """Return the worker that this rank belongs to: all its ranks end together. Any other part is by itself."""
    return part.partition("-rank-")[0]


class Parts:
    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._pids: dict[str, int] = {}  # by part
        self._since: dict[int, float] = {}  # pid -> when it was first seen
        self._hurt_early: set[str] = set()  # workers
        self._hurts: list[tuple[float, str]] = []  # when, part
        self.look()

    def look(self) -> None:
        """Note which processes the parts have now."""
        now = time.monotonic()
        named = ((part_of(command), pid) for pid, command in self._processes().items())
        self._pids = {part: pid for part, pid in named if part is not None and role_of(part) in ROLES}
        self._since = {pid: self._since.get(pid, now) for pid in self._pids.values()}

    def choose(self, draw: Random, roles: Collection[str] = ROLES) -> tuple[str, int] | None:
        """Return the name and the pid of a part that may be hurt now, if there is any."""
        self.look()
        found = [part for part in sorted(self._pids) if role_of(part) in roles and self._may_be_hurt(part, draw)]
        if not found:
            return None
        part = draw.choice(found)
        if self._is_rested(part):
            self._hurt_early.discard(worker_of(part))
        else:
            self._hurt_early.add(worker_of(part))
        self.note(part)
        return part, self._pids[part]

    def _may_be_hurt(self, part: str, draw: Random) -> bool:
        return self._is_rested(part) or (worker_of(part) not in self._hurt_early and draw.random() < _EARLY)

    def _is_rested(self, part: str) -> bool:
        ranks = [pid for other, pid in self._pids.items() if worker_of(other) == worker_of(part)]
        return time.monotonic() - max(self._since[pid] for pid in ranks) > RESTED_S

    def note(self, part: str) -> None:
        """Note that the part is hurt now."""
        self._hurts.append((time.monotonic(), part))

    def was_hurt(self, role: str, since: float, until: float) -> bool:
        return any(since <= at <= until and role_of(part) == role for at, part in self._hurts)
