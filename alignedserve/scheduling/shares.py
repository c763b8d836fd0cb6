"""The equal parts of a worker that callers have: what is beyond them gives way.

A worker has so much to give: seats, or time for prompts before a first token would be late. As long as that is enough
for all, a caller takes what it wants. Where it is not, each caller has an equal part; what a caller leaves of its own is
divided among the others (max-min fairness). For example, of 64 seats a caller with 1 request takes 1, and one with 160
requests has 63: its other 97 are beyond its part.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def equal_part(wanted: Iterable[float], capacity: float) -> float:
    """Return the most that a caller gets where each wants this much: infinity where there is enough for all."""
    left, rising = capacity, sorted(wanted)
    for number, amount in enumerate(rising):
        part = left / (len(rising) - number)
        if amount > part:
            return part
        left -= amount
    return float("inf")


def beyond_parts(amounts: Mapping[str, Mapping[T, float]], capacity: float) -> set[T]:
    """Return the requests that are beyond their caller's part.

    `amounts` has what each request of a caller takes, in the order in which they are to be served. A request that lies
    on the border is within: so each caller has one at least, however much it takes."""
    if len(amounts) < 2:
        return set()
    part = equal_part([sum(taken.values()) for taken in amounts.values()], capacity)
    beyond: set[T] = set()
    for taken in amounts.values():
        used = 0.0
        for request, amount in taken.items():
            if used >= part:
                beyond.add(request)
            used += amount
    return beyond
