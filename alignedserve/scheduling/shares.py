"""The parts of a worker that callers have: what is beyond them gives way.

A worker's seats are limited, and so are the prompt tokens of its next step. As long as both are enough for all, a
caller takes what it wants. Where they are not, each caller has a part by its weight, which is 1 unless its key says
more; what a caller leaves of it is divided among the others (weighted max-min fairness). For example, of 64 seats a
caller with 1 request takes 1, and one with 160 requests has 63: its other 97 are beyond its part. Of two with 160 each,
and weights 3 and 1, one has 48 and the other 16.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def part_of_one(wanted: Iterable[tuple[float, int]], capacity: float) -> float:
    """Return the most that a caller of weight 1 gets where each wants this much, with its weight: infinity where there
    is enough for all."""
    rising = sorted(wanted, key=lambda each: each[0] / each[1])
    left, weights = capacity, sum(weight for _, weight in rising)
    for amount, weight in rising:
        part = left / weights
        if amount > part * weight:
            return part
        left -= amount
        weights -= weight
    return float("inf")


def beyond_parts(
    amounts: Mapping[str, Mapping[T, float]],
    capacity: float,
    weights: Mapping[str, int],
    are_divisible: bool = False,
) -> dict[T, None]:
    """Return the requests that are beyond their caller's part, in the order in which they are given.

    `amounts` has what each request of a caller takes, in the order in which they are to be served. A request that lies
    on the border is within, so that each caller has one at least; but where amounts are divisible, it is beyond: a
    caller that wants little does not wait for one that wants much."""
    beyond: dict[T, None] = {}
    if len(amounts) < 2:
        return beyond
    one = part_of_one([(sum(taken.values()), weights[caller]) for caller, taken in amounts.items()], capacity)
    for caller, taken in amounts.items():
        used, part = 0.0, one * weights[caller]
        for request, amount in taken.items():
            if used + amount > part if are_divisible else used >= part:
                beyond[request] = None
            used += amount
    return beyond
