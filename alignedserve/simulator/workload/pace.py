"""When visits begin. (A visit is a request, or a conversation of several.)

Open arrivals come when they come, each announced by the one before it; with closed ones a new visit begins because
another has ended. A `Pace` is such a process under way; all it says are times at which visits begin.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat
from random import Random
from typing import Protocol

from alignedserve.config.setting import setting
from alignedserve.errors import WorkloadError

LEAST_RATE, MOST_RATE = 1e-4, 1e6  # arrivals in a second: with fewer nothing happens for hours
_EVEN = 1e-3  # a coefficient of variation below which intervals are all alike
_PAUSE_S = 1.0  # after a visit that failed: whoever is refused at once does not come back at once


class VisitPace(Protocol):
    def start(self, now: float) -> list[float]: ...

    def arrived(self) -> list[float]:
        """A visit has begun."""

    def ended(self, now: float, failed: bool) -> list[float]:
        """A visit is over."""


class ArrivalProcess(ABC):
    """The process as it is asked for."""

    ends = False  # by itself

    @property
    def mean_rate(self) -> float | None:
        """Visits in a second; None where they do not come at a rate of their own."""
        return None

    def scaled(self, factor: float) -> ArrivalProcess:
        """The same at so many times the rate, where there is one."""
        return self

    @abstractmethod
    def pace(self, draw: Random) -> VisitPace: ...


class OpenArrivals(ArrivalProcess):
    def pace(self, draw: Random) -> VisitPace:
        return _OpenPace(self.after(draw))

    @abstractmethod
    def after(self, draw: Random) -> Iterator[float]:
        """How many seconds after the start each visit begins."""


class _OpenPace:
    def __init__(self, after: Iterator[float]) -> None:
        self._after = after
        self._started_at = 0.0

    def start(self, now: float) -> list[float]:
        self._started_at = now
        return self.arrived()

    def arrived(self) -> list[float]:
        return [self._started_at + after for after in islice(self._after, 1)]

    def ended(self, now: float, failed: bool) -> list[float]:
        return []


@dataclass(frozen=True)
class Gamma(OpenArrivals):
    """Gamma intervals, one independent of the other."""

    rate: float = setting(4.0, "arrivals in a second", least=LEAST_RATE, most=MOST_RATE)
    cv: float = setting(
        1.0, "coefficient of variation of the intervals: 1 is Poisson, 0 an even beat", least=0, most=100
    )

    @property
    def mean_rate(self) -> float:
        return self.rate

    def scaled(self, factor: float) -> Gamma:
        return replace(self, rate=self.rate * factor)

    def after(self, draw: Random) -> Iterator[float]:
        at = 0.0
        while True:
            at += self._interval(draw) / self.rate
            yield at

    def _interval(self, draw: Random) -> float:
        """Of mean 1, so that another rate is the same draw."""
        return draw.gammavariate(self.cv**-2, self.cv**2) if self.cv > _EVEN else 1.0


@dataclass(frozen=True)
class Bursts(OpenArrivals):
    """Poisson, at another rate towards the end of every period."""

    calm: float = setting(2.0, "arrivals in a second between bursts", least=0, most=MOST_RATE)
    peak: float = setting(20.0, "arrivals in a second in a burst", least=LEAST_RATE, most=MOST_RATE)
    every_s: float = setting(30.0, "from burst to burst, in seconds", above=0)
    lasts_s: float = setting(3.0, "length of a burst, in seconds", above=0)

    def __post_init__(self) -> None:
        if self.lasts_s > self.every_s:
            raise WorkloadError(f"lasts_s must be every_s {self.every_s:g} or less, not {self.lasts_s:g}")

    @property
    def mean_rate(self) -> float:
        return self.calm + (self.peak - self.calm) * self.lasts_s / self.every_s

    def scaled(self, factor: float) -> Bursts:
        return replace(self, calm=self.calm * factor, peak=self.peak * factor)

    def after(self, draw: Random) -> Iterator[float]:
        return _thinned(draw, max(self.calm, self.peak), self._rate_at)

    def _rate_at(self, at: float) -> float:
        return self.peak if at % self.every_s >= self.every_s - self.lasts_s else self.calm


@dataclass(frozen=True)
class Diurnal(OpenArrivals):
    """Poisson, at a rate that goes up and down in a sine; it begins with the least."""

    least: float = setting(1.0, "arrivals in a second when they are fewest", least=0, most=MOST_RATE)
    most: float = setting(8.0, "arrivals in a second when they are most", least=LEAST_RATE, most=MOST_RATE)
    period_s: float = setting(86_400.0, "length of a day, in seconds", above=0)

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise WorkloadError(f"least must be most {self.most:g} or less, not {self.least:g}")

    @property
    def mean_rate(self) -> float:
        return (self.least + self.most) / 2

    def scaled(self, factor: float) -> Diurnal:
        return replace(self, least=self.least * factor, most=self.most * factor)

    def after(self, draw: Random) -> Iterator[float]:
        return _thinned(draw, self.most, self._rate_at)

    def _rate_at(self, at: float) -> float:
        return self.mean_rate - (self.most - self.least) / 2 * math.cos(math.tau * at / self.period_s)


def _thinned(draw: Random, most: float, rate_at: Callable[[float], float]) -> Iterator[float]:
    """Of a Poisson process at the highest rate, the share that the rate of the moment keeps."""
    at = 0.0
    while True:
        at += draw.expovariate(1.0) / most
        if draw.random() * most < rate_at(at):
            yield at


@dataclass(frozen=True)
class AtOnce(OpenArrivals):
    """All with the start."""

    def after(self, draw: Random) -> Iterator[float]:
        return repeat(0.0)


@dataclass(frozen=True)
class Recorded(OpenArrivals):
    """As they once came; the first of them with the start."""

    times: tuple[float, ...]  # rising
    speed: float = 1.0

    ends = True

    @property
    def mean_rate(self) -> float | None:
        """None where all came at once."""
        lasted_s = self.times[-1] - self.times[0]
        return self.speed * (len(self.times) - 1) / lasted_s if lasted_s else None

    def scaled(self, factor: float) -> Recorded:
        return replace(self, speed=self.speed * factor)

    def after(self, draw: Random | None = None) -> Iterator[float]:
        return ((time - self.times[0]) / self.speed for time in self.times)


@dataclass(frozen=True)
class ClosedArrivals(ArrivalProcess):
    """So many visits at a time: the next lot begins when the last one has ended."""

    in_flight: int = setting(32, "visits in a lot", least=1)
    replace: bool = setting(False, "each is followed when it ends, without waiting for the rest of its lot")

    def pace(self, draw: Random) -> VisitPace:
        return _ClosedPace(self)


class _ClosedPace:
    def __init__(self, closed: ClosedArrivals) -> None:
        self._size, self._replace = closed.in_flight, closed.replace
        self._num_open = 0

    def start(self, now: float) -> list[float]:
        self._num_open = self._size
        return [now] * self._size

    def arrived(self) -> list[float]:
        return []

    def ended(self, now: float, failed: bool) -> list[float]:
        at = now + _PAUSE_S if failed else now
        if self._replace:
            return [at]
        self._num_open -= 1
        return [] if self._num_open else self.start(at)
