"""How many workers of a kind the load takes: more of them soon, fewer slowly.

    pressure   how near what was promised is to being missed; from 1 on the workers are short of it
    load       what there is to do, in workers

    pressed for `grow_after_s`           as many more as that takes: one at least, at most as many again
    at ease for all of `shrink_after_s`  one less, if the others carry the load with room to spare

A worker carries a load of 1; less where they were pressed at less: that is learnt whenever it happens, and forgotten
by a twentieth in a window. Who left for want of load would otherwise come back as soon as it has left, again and again.

New workers have to load a model first, on machines that may have to start: until they have come, or START_S has passed,
nothing more is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, exp, inf

from alignedserve.config.config import ScaleConfig
from alignedserve.config.topology import Range
from alignedserve.core import Role
from alignedserve.protocol.commands import Scale

LOOK_S = 1.0  # between two looks at what there is to do
START_S = 120.0  # by then a worker that was asked for has come, or does not
MOST_TIMES = 2.0  # as many at once
_FULL = 0.8  # of what workers carry is what they are to have after there are more of them
_SPARE = 0.7  # of what they carry is the most that may be left to those that stay
_LEAST = 0.01  # that a worker is taken to carry, however little there was to do when they were pressed
_FORGOTTEN = 1.05  # what they are known to carry rises so, in each window at ease


@dataclass(frozen=True, slots=True)
class Sizes:
    """Between which numbers; a role that is not named stays as it is."""

    of: Mapping[Role, Range] = field(default_factory=dict)
    grow_after_s: float = 3.0
    shrink_after_s: float = 300.0
    be_wait_s: float = 60.0  # that best-effort requests may wait, as predicted


def sizes_of(scale: ScaleConfig) -> Sizes:
    return Sizes(scale.ranges, shrink_after_s=scale.shrink_after_s)


@dataclass(frozen=True, slots=True)
class Demand:
    """Of the workers of a role."""

    workers: int  # that are there, and not about to go
    load: float = 0.0
    pressure: float = 0.0
    why: str = ""  # of the pressure


class Sizing:
    """Told once in a while what there is to do."""

    def __init__(self, sizes: Sizes) -> None:
        self._kinds = {role: _Kind(between, sizes) for role, between in sizes.of.items()}

    @property
    def is_on(self) -> bool:
        return bool(self._kinds)

    def look(self, demands: Mapping[Role, Demand], now: float) -> Scale | None:
        """What is to change."""
        changes = {role: kind.look(demands[role], now) for role, kind in self._kinds.items()}
        wanted = {role: change for role, change in changes.items() if change is not None}
        if not wanted:
            return None
        counts = {role: count for role, (count, _) in wanted.items()}
        why = "; ".join(f"{role.value}: {why}" for role, (_, why) in wanted.items())
        return Scale(counts.get(Role.PREFILL), counts.get(Role.DECODE), why)

    def retires(self, role: Role, left: int) -> None:
        """One of them is to go, whoever has asked for it."""
        if role in self._kinds:
            self._kinds[role].wanted = left


class _Kind:
    def __init__(self, between: Range, sizes: Sizes) -> None:
        self._between, self._sizes = between, sizes
        self.wanted = 0  # those that are there, and those that were asked for
        self._asked_at = -inf
        self._carries = 1.0  # load, of a worker
        self._pressed_at: float | None = None  # since when, if they are
        self._most_load = 0.0  # since then
        self._eased_at: float | None = None  # since when they are at ease and as many as they are
        self._load, self._looked_at = 0.0, 0.0  # its moving mean, as of then

    def look(self, demand: Demand, now: float) -> tuple[int, str] | None:
        """How many there are to be, and why."""
        self._average(demand.load, now)
        self.wanted = max(self.wanted, demand.workers)
        if demand.workers < self.wanted:
            if now - self._asked_at >= START_S:
                self.wanted = demand.workers  # others do not come: what there is counts
            self._pressed_at = self._eased_at = None
            return None
        if not demand.workers:
            return None
        count, why = self._more(demand, now) if demand.pressure >= 1 else self._fewer(demand, now)
        if count == demand.workers:
            return None
        self.wanted, self._asked_at = count, now
        self._pressed_at = self._eased_at = None
        return count, why

    def _more(self, demand: Demand, now: float) -> tuple[int, str]:
        self._eased_at, num = None, demand.workers
        if self._pressed_at is None:
            self._pressed_at, self._most_load = now, 0.0
        self._most_load = max(self._most_load, demand.load)
        if now - self._pressed_at < self._sizes.grow_after_s:
            return num, ""
        if self._most_load:
            self._carries = max(_LEAST, min(self._carries, self._most_load / num / demand.pressure))
        by_load = self._most_load / (self._carries * _FULL)
        count = max(num + 1, ceil(min(MOST_TIMES * num, max(by_load, num * demand.pressure))))
        return self._between.nearest(count), demand.why

    def _fewer(self, demand: Demand, now: float) -> tuple[int, str]:
        self._pressed_at, num = None, demand.workers
        if self._eased_at is None:
            self._eased_at = now
        if now - self._eased_at < self._sizes.shrink_after_s:
            return num, ""
        self._eased_at = now
        if self._load <= _SPARE * self._carries * (num - 1):
            return self._between.nearest(num - 1), f"a load of {self._load:.2f} takes no more"
        self._carries = min(1.0, self._carries * _FORGOTTEN)
        return num, ""

    def _average(self, load: float, now: float) -> None:
        """Over a quarter of the window, or so."""
        kept = exp(-4 * (now - self._looked_at) / self._sizes.shrink_after_s) if self._looked_at else 0.0
        self._load, self._looked_at = kept * self._load + (1 - kept) * load, now
