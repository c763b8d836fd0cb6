"""The times at which visits begin. (A visit is a request, or a conversation of several requests.)

With open arrivals, visits begin at times of their own; the begin of a visit announces the next visit. With closed
arrivals, a new visit begins because another visit has ended. A `VisitPace` is a running process of arrivals; it only
says at which times visits begin.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat
from random import Random

from alignedserve.config.setting import setting
from alignedserve.errors import WorkloadError

LEAST_RATE, MOST_RATE = 1e-4, 1e6  # arrivals in a second: below the least, nothing happens for hours
_EVEN = 1e-3  # a coefficient of variation below which all intervals are equal
_PAUSE_S = 1.0  # after a visit that failed: a client that is refused at once does not return at once


class VisitPace:
    """A running process of arrivals: each method returns times at which further visits begin."""

    def __init__(self, after: Iterator[float]) -> None:
        self._after = after
        self._started_at = 0.0

    def start(self, now: float) -> list[float]:
        self._started_at = now
        return self.arrived()

    def arrived(self) -> list[float]:
        """Hear that a visit has begun."""
        return [self._started_at + after for after in islice(self._after, 1)]

    def ended(self, now: float, failed: bool) -> list[float]:
        """Hear that a visit has ended."""
        return []


class ArrivalProcess(ABC):
    """A process of arrivals, as a workload describes it."""

    ends = False  # whether it ends by itself

    @property
    def mean_rate(self) -> float | None:
        """Return the visits in a second; None if they have no rate of their own."""
        return None

    def scaled(self, factor: float) -> ArrivalProcess:
        """Return the process with its rate times this factor, or unchanged if it has no rate."""
        return self

    @abstractmethod
    def pace(self, draw: Random) -> VisitPace: ...


class OpenArrivals(ArrivalProcess):
    """Arrivals that do not wait for earlier visits to end."""

    def pace(self, draw: Random) -> VisitPace:
        return VisitPace(self.after(draw))

    @abstractmethod
    def after(self, draw: Random) -> Iterator[float]:
        """Yield for each visit how many seconds after the start it begins."""


@dataclass(frozen=True)
class Gamma(OpenArrivals):
    """Arrivals at independent intervals of a gamma distribution."""

    rate: float = setting(4.0, "arrivals in a second", least=LEAST_RATE, most=MOST_RATE)
    cv: float = setting(
        1.0, "coefficient of variation of the intervals: 1 is Poisson, 0 means equal intervals", least=0, most=100
    )

    @property
    def mean_rate(self) -> float:
        return self.rate

    def scaled(self, factor: float) -> Gamma:
        return replace(self, rate=self.rate * factor)

    def after(self, draw: Random) -> Iterator[float]:
        at = 0.0
        while True:
            interval = draw.gammavariate(self.cv**-2, self.cv**2) if self.cv > _EVEN else 1.0  # at each rate the same
            at += interval / self.rate
            yield at


@dataclass(frozen=True)
class Bursts(OpenArrivals):
    """Poisson arrivals with a burst at the end of every period."""

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
    """Poisson arrivals at a rate that follows a sine and begins with its least value."""

    least: float = setting(1.0, "lowest rate, in arrivals in a second", least=0, most=MOST_RATE)
    most: float = setting(8.0, "highest rate, in arrivals in a second", least=LEAST_RATE, most=MOST_RATE)
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
    """Yield Poisson arrivals at a changing rate: draw them at the highest rate, and keep the current rate's share."""
    at = 0.0
    while True:
        at += draw.expovariate(1.0) / most
        if draw.random() * most < rate_at(at):
            yield at


@dataclass(frozen=True)
class AtOnce(OpenArrivals):
    """All visits begin at the start."""

    def after(self, draw: Random) -> Iterator[float]:
        return repeat(0.0)


@dataclass(frozen=True)
class Recorded(OpenArrivals):
    """Arrivals at recorded times; the first visit begins at the start."""

    times: tuple[float, ...]  # rising
    speed: float = 1.0

    ends = True

    @property
    def mean_rate(self) -> float | None:
        """Return the mean rate of the record; None if all arrived at once."""
        lasted_s = self.times[-1] - self.times[0]
        return self.speed * (len(self.times) - 1) / lasted_s if lasted_s else None

    def scaled(self, factor: float) -> Recorded:
        return replace(self, speed=self.speed * factor)

    def after(self, draw: Random | None = None) -> Iterator[float]:
        return ((time - self.times[0]) / self.speed for time in self.times)


@dataclass(frozen=True)
class ClosedArrivals(ArrivalProcess):
    """Lots of visits: the next lot begins when the last visit of a lot has ended."""

    in_flight: int = setting(32, "visits in a lot, which run at the same time", least=1)
    replace: bool = setting(
        False, "a new visit follows each visit when it ends, without waiting for the rest of its lot"
    )

    def pace(self, draw: Random) -> VisitPace:
        return _ClosedPace(self)


class _ClosedPace(VisitPace):
    def __init__(self, closed: ClosedArrivals) -> None:
        super().__init__(iter(()))
        self._size, self._replace = closed.in_flight, closed.replace
        self._num_open = 0

    def start(self, now: float) -> list[float]:
        self._num_open = self._size
        return [now] * self._size

    def ended(self, now: float, failed: bool) -> list[float]:
        at = now + _PAUSE_S if failed else now
        if self._replace:
            return [at]
        self._num_open -= 1
        return [] if self._num_open else self.start(at)
