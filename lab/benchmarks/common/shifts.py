"""Say whether figures moved: the same seeds before and now, as a mean with its error, against limits.

    before 50.0, 52.0, 51.0; now 54.0, 56.5, 55.0      +8.1 ± 0.2 % of latency, limit 5: red
    before 61.0, 70.2, 66.1; now 66.0, 63.9, 68.0      +0.4 ± 5.3 %, the seeds' spread: not red

A shift is red where it is worse than its limit by more than twice the error of its mean. So few seeds with wide spreads
say nothing by themselves; the mean over all loads of a kind says it then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import fmean, stdev

POINTS, PERCENT = "points", "%"
ERRORS = 2.0  # of a mean, within which it is no shift


@dataclass(frozen=True)
class Limit:
    """By how much a column may get worse."""

    most: float
    unit: str
    is_less_better: bool = False

    def shift(self, before: float | None, now: float | None) -> float | None:
        """Return by how much a figure got better, in the unit; None where there was none."""
        if before is None:
            return None
        if now is None:
            return -inf  # what was there is gone
        gain = before - now if self.is_less_better else now - before
        if self.unit == POINTS or not gain:
            return gain
        return 100 * gain / before if before else inf * gain


LIMITS: Mapping[str, Limit] = {
    "attained": Limit(1.0, POINTS),
    "documents": Limit(3.0, PERCENT),
    "latency_ms": Limit(5.0, PERCENT, is_less_better=True),
    "first_p95_ms": Limit(5.0, PERCENT, is_less_better=True),
    "gap_p99_ms": Limit(5.0, PERCENT, is_less_better=True),
}


@dataclass(frozen=True)
class Shift:
    mean: float  # above 0: better
    error: float  # of the mean

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Shift:
        if not all(map(isfinite, values)):
            return cls(min(values) if min(values) == -inf else max(values), 0.0)
        return cls(fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0)

    def is_worse(self, most: float) -> bool:
        return -self.mean - ERRORS * self.error > most

    def is_better(self, least: float) -> bool:
        return self.mean - ERRORS * self.error > least

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ± {self.error:.2g}"


Seeds = Mapping[int, Mapping[str, float | None]]  # columns of a load by seed
Shifts = Mapping[str, Sequence[float]]  # by column, of each seed


def shifts(before: Seeds, now: Seeds) -> Shifts:
    """Return by how much each column of a load got better, for each seed that is in both."""
    found = {
        column: [
            shift
            for seed in sorted(before.keys() & now.keys())
            if (shift := limit.shift(before[seed].get(column), now[seed].get(column))) is not None
        ]
        for column, limit in LIMITS.items()
    }
    return {column: values for column, values in found.items() if values}


def together(each: Iterable[Shifts]) -> Shifts:
    """Return the shifts of several loads as those of one."""
    found: dict[str, list[float]] = {}
    for one in each:
        for column, values in one.items():
            found.setdefault(column, []).extend(values)
    return found


def worse(found: Shifts) -> dict[str, Shift]:
    """Return the columns that are red."""
    by_column = {column: Shift.from_values(values) for column, values in found.items()}
    return {column: shift for column, shift in by_column.items() if shift.is_worse(LIMITS[column].most)}


def better(found: Shifts) -> dict[str, Shift]:
    by_column = {column: Shift.from_values(values) for column, values in found.items()}
    return {column: shift for column, shift in by_column.items() if shift.is_better(LIMITS[column].most)}


WORTH = {POINTS: 0.5, PERCENT: 1.0}  # at least, of a mean over a kind of loads, for a rule to stay


def verdict(by_load: Mapping[str, Shifts], kind_of: Callable[[str], str]) -> str:
    """Return what a rule is worth, by what it brings to each load: to whole kinds of loads, or to single ones.

    A load by itself counts where the rule brings something to it and costs no kind anything."""
    kinds = {kind_of(load): dict[str, Shifts]() for load in by_load}
    for load, brings in by_load.items():
        kinds[kind_of(load)][load] = brings
    of_kinds = {f"all {kind} ({len(loads)} loads)": together(loads.values()) for kind, loads in kinds.items()}
    gains, costs = _beyond(of_kinds, 1), _beyond(of_kinds, -1)
    if gains:
        return f"worth {gains}{f'; costs {costs}' if costs else ''}"
    if costs:
        return f"not worth it: costs {costs}"
    if named := _beyond(by_load, 1):
        return f"no worth over any kind; for these loads alone {named}; costs no kind anything"
    return f"no worth in {len(by_load)} loads"


def _beyond(found: Mapping[str, Shifts], sign: int) -> str:
    """Return in words what is beyond the worth that counts, to the better (1) or to the worse (-1)."""
    told: list[str] = []
    for name, brings in found.items():
        by_column = {column: Shift.from_values([sign * each for each in values]) for column, values in brings.items()}
        counts = {
            c: shift for c, shift in by_column.items() if shift.is_better(0.0) and shift.mean >= WORTH[LIMITS[c].unit]
        }
        told += [f"{words(counts)} over {name}"] if counts else []
    return "; ".join(told)


def words(found: Mapping[str, Shift]) -> str:
    return ", ".join(f"{column} {shift} {LIMITS[column].unit}" for column, shift in found.items())


def drawn(costs: Mapping[str, float], base: str, most_s: float) -> list[str]:
    """Return loads of at most so much processor time, in an order that follows from the base of a change and from their
    names alone: nobody who edits the change can draw again."""
    order = sorted(costs, key=lambda load: hashlib.blake2b(f"{base}\n{load}".encode()).digest())
    chosen, left_s = list[str](), most_s
    for load in order:
        if costs[load] <= left_s:
            chosen.append(load)
            left_s -= costs[load]
    return chosen
