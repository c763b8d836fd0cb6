"""Priority levels, and how long a request waits with such levels (ALISE).

The fewer steps a request is predicted to need, or has got, the higher the level (ALISE §3.1).

There are five levels. The first, which is the highest, reaches to 32 steps, and each other to twice the bound before:

    level     0      1      2       3       4
    steps   ..32   ..64   ..128   ..256   257..

A step brings one token, so a bound in median steps is a bound in tokens; tokens of a prompt that are still to run count
like output tokens, since a long prompt holds memory as long output does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

LEVELS = 5
FIRST_BOUND = 32  # most steps of the first level
TOP = -1  # above the first level: requests that have waited for an age there
INTERRUPTED = TOP - 1  # above all others: requests with output that have lost their memory
AGE_S = 120.0  # after which an unserved best-effort request rises a level
STEP_PROMPT = 32  # prompt tokens that count as a step of service: about what a GPU runs in the time of a decode


def level_of(steps: int) -> int:
    """Return the level of a request that is predicted to need `steps` more."""
    return min(LEVELS - 1, ((max(1, steps) - 1) // FIRST_BOUND).bit_length())  # called for many requests at every step


class Level:
    """The level of a best-effort request, served or waiting."""

    __slots__ = ("_age_s", "_served_at", "num_outlived")

    def __init__(self, served_at: float, age_s: float) -> None:
        self._served_at, self._age_s = served_at, age_s
        self.num_outlived = 0  # predictions that were too low: each is a level down, whatever is predicted now

    def served(self, now: float) -> None:
        self._served_at = now

    def at(self, now: float, steps: int, has_begun: bool = False) -> int:
        """Return the level of a request that needs `steps` more: one level higher for each age of waiting.

        A request that has waited for an age in the first level goes above all levels: otherwise short requests would
        always come first in the first level. A request that has begun goes above all levels after one age.
        """
        rises = self.num_ages(now)
        if has_begun and rises:
            return TOP
        return max(TOP, min(LEVELS - 1, level_of(steps) + self.num_outlived) - rises)

    def rises_at(self, now: float) -> float:
        """Return when the request rises next."""
        return self._served_at + (self.num_ages(now) + 1) * self._age_s

    def num_ages(self, now: float) -> int:
        """Return how many ages have passed without service, exactly: one more right after `rises_at`.

        Gain: where short documents fill all seats, long ones begin after five ages (four to the first level, and one
        above it), for 10 % of the tokens of the short ones; without it they wait until no short one comes. On loads of
        a minute nothing waits for an age."""
        if now <= self._served_at + self._age_s:
            return 0
        rises = max(0, int((now - self._served_at) / self._age_s))
        while rises > 0 and self._served_at + rises * self._age_s >= now:
            rises -= 1
        while self._served_at + (rises + 1) * self._age_s < now:
            rises += 1
        return rises


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InLine:
    """A request that waits, as the formula of the expected wait sees it (ALISE §3.2).

        EWT = min( predicted time of all ahead / average batch,   after all that are ahead,
                   age x (level + 1) - waited )                   or once age has brought the request to the front

    The request with the longest expected wait needs its pages last: the pool compresses these pages first, and a
    prefill worker gives up this request's KV first.
    """

    predicted_s: float  # how long the request runs by itself
    waited_s: float
    level: int | None  # None: the request has no level, and does not age


def expected_waits(line: Iterable[InLine], mean_batch: float, age_s: float = AGE_S) -> Iterator[float]:
    """Yield the expected wait of each request if served in this order, `mean_batch` at a time."""
    ahead_s = 0.0
    for request in line:
        by_age = inf if request.level is None else age_s * (request.level + 1) - request.waited_s
        yield max(0.0, min(ahead_s / mean_batch, by_age))
        ahead_s += request.predicted_s


def shortest_wait_first(
    line: Sequence[T], as_seen: Callable[[T], InLine], mean_batch: float, age_s: float = AGE_S
) -> list[T]:
    """Return the requests of `line`, which are served in that order, sorted by expected wait; equals stay in order."""
    waits = list(expected_waits(map(as_seen, line), mean_batch, age_s))
    return [line[at] for at in sorted(range(len(line)), key=lambda at: (waits[at], at))]
