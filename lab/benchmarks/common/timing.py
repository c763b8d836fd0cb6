"""How work is timed in turns, so that slow phases of the machine affect all of it alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from timeit import repeat

Work = Callable[[], object]


def in_turns(
    variants: Mapping[str, Work], seconds: float = 0.0, least: int = 5, clock: Callable[[], float] = perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each run by the clock: rounds of all variants for so long, and at least so many rounds."""
    took: dict[str, list[float]] = {name: [] for name in variants}
    end = perf_counter() + seconds
    while perf_counter() < end or len(next(iter(took.values()))) < least:
        for name, run in variants.items():
            began = clock()
            run()
            took[name].append(clock() - began)
    return took


def least_us(work: Work, times: int, rounds: int = 5) -> float:
    """Return the microseconds of a call, in the fastest of the rounds of so many calls."""
    return 1e6 * min(repeat(work, number=times, repeat=rounds)) / times
