"""The expected waiting time of requests that wait in line (ALISE §3.2).

    EWT = min( predicted time of all ahead / average batch,   the request is served after those ahead of it,
               age x (level + 1) - waited )                   or once it is so old that it comes first

The request that waits longest can do without its pages for longest: the pool compresses its pages first, and a prefill
worker gives up first what it has prefetched for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from alignedserve.scheduling.levels import AGE_S

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InLine:
    """A request that waits, as the formula sees it."""

    predicted_s: float  # how long the request runs by itself
    waited_s: float
    level: int | None  # None where the request has no level: it does not age


def expected_waits(line: Iterable[InLine], mean_batch: float, age_s: float = AGE_S) -> Iterator[float]:
    """Yield the expected wait of each request when they are served in this order, `mean_batch` at a time."""
    ahead_s = 0.0
    for request in line:
        by_age = inf if request.level is None else age_s * (request.level + 1) - request.waited_s
        yield max(0.0, min(ahead_s / mean_batch, by_age))
        ahead_s += request.predicted_s


def shortest_wait_first(
    line: Sequence[T], as_seen: Callable[[T], InLine], mean_batch: float, age_s: float = AGE_S
) -> list[T]:
    """Return the requests of `line`, which are served in that order, by expected wait; equals stay in order."""
    waits = list(expected_waits(map(as_seen, line), mean_batch, age_s))
    return [line[at] for at in sorted(range(len(line)), key=lambda at: (waits[at], at))]
