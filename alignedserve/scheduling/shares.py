"""The equal parts of a worker that callers have: what is beyond them gives way.

A worker's seats are limited, and so are the prompt tokens of its next step. As long as both are enough for all, a
caller takes what it wants. Where they are not, each caller has an equal part; what a caller leaves of it is divided
among the others (max-min fairness). For example, of 64 seats a caller with 1 request takes 1, and one with 160 requests
has 63: its other 97 are beyond its part.
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


def beyond_parts(
    amounts: Mapping[str, Mapping[T, float]], capacity: float, are_divisible: bool = False
) -> dict[T, None]:
    """Return the requests that are beyond their caller's part, in the order in which they are given.

    `amounts` has what each request of a caller takes, in the order in which they are to be served. A request that lies
    on the border is within, so that each caller has one at least; but where amounts are divisible, it is beyond: a
    caller that wants little does not wait for one that wants much."""
    beyond: dict[T, None] = {}
    if len(amounts) < 2:
        return beyond
    part = equal_part([sum(taken.values()) for taken in amounts.values()], capacity)
    for taken in amounts.values():
        used = 0.0
        for request, amount in taken.items():
            if used + amount > part if are_divisible else used >= part:
                beyond[request] = None
            used += amount
    return beyond
