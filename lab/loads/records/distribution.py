"""Summarise many values in a few numbers, with one definition for every figure and every plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, nan

NOTHING = nan  # the value of a figure that has no data
MOST_DOTS = 5000  # of a curve or a scatter plot: evenly picked from more


def percentile(values: Iterable[float], percent: int) -> float:
    """Return the smallest value that `percent` percent of the values do not exceed."""
    return _percentile_of_sorted(sorted(values), percent)


def _percentile_of_sorted(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else NOTHING


def mean(values: Sequence[float]) -> float:
    """Return the mean, exactly rounded: it does not depend on the order of the values."""
    return ratio(fsum(values), len(values))


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else NOTHING


def cdf(values: Iterable[float]) -> list[tuple[float, float]]:
    """Return each value with the share of values up to it. Thin out many values, but keep the largest."""
    ordered = sorted(values)
    every = len(ordered) // MOST_DOTS + 1
    return [(ordered[at], (at + 1) / len(ordered)) for at in range(len(ordered) - 1, -1, -every)][::-1]


def share(held: Sequence[bool]) -> float:
    return ratio(sum(held), len(held))


@dataclass(frozen=True, slots=True)
class Distribution:
    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float

    @classmethod
    def from_values(cls, values: Iterable[float]) -> Distribution:
        ordered = sorted(values)
        percentiles = (_percentile_of_sorted(ordered, percent) for percent in (50, 90, 95, 99, 100))
        return cls(len(ordered), mean(ordered), *percentiles)
