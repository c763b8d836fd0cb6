"""Many values as a few numbers: one definition of each, for every figure and every plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, nan

NOTHING = nan  # what a figure is where there is nothing that it could be of


def percentile(values: Iterable[float], percent: int) -> float:
    """The smallest value that so many percent do not exceed."""
    return _in_order(sorted(values), percent)


def _in_order(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else NOTHING


def mean(values: Sequence[float]) -> float:
    """Exactly rounded, so that it does not depend on the order of the values."""
    return ratio(fsum(values), len(values))


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else NOTHING


def share(held: Sequence[bool]) -> float:
    return ratio(sum(held), len(held))


@dataclass(frozen=True, slots=True)
class Distribution:
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        ordered = sorted(values)
        p50, p90, p99, most = (_in_order(ordered, percent) for percent in (50, 90, 99, 100))
        return cls(len(ordered), mean(ordered), p50, p90, p99, most)
