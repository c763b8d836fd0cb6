"""Parts of what several callers want: weighted max-min fairness.

A caller that wants less than its part gets what it wants, and leaves the rest to the others.
"""

from __future__ import annotations

from collections.abc import Iterable


def part_of_one(wanted: Iterable[tuple[float, int]], capacity: float) -> float:
    """Return the most that a caller of weight 1 gets; infinity where there is enough for all.

    `wanted` has what each caller wants, with the caller's weight."""
    rising = sorted(wanted, key=lambda each: each[0] / each[1])
    left, weights = capacity, sum(weight for _, weight in rising)
    for amount, weight in rising:
        part = left / weights
        if amount > part * weight:
            return part
        left -= amount
        weights -= weight
    return float("inf")
