"""How much of something, drawn anew each time: tokens of a prompt, turns of a conversation, seconds of a deadline.

200                        always that
512-1024                   uniform
exp:60:400                 exponential of mean 60, cut at 400
lognormal:223:256:2048     of mean 223 and deviation 256, cut at 2048
10-999@0.9|1000-8000@0.1   one of several, by weight: 1 where none is given
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

_MOST = 1e9
FORMS = (
    "written 200, 512-1024, exp:MEAN:MOST, lognormal:MEAN:DEVIATION:MOST or several of them as A@WEIGHT|B@WEIGHT, "
    "of numbers above 0 and up to a billion"
)


class Amount(ABC):
    """More than 0, and not beyond what anybody means."""

    @abstractmethod
    def draw(self, draw: Random) -> float: ...

    def count(self, draw: Random) -> int:
        """As a whole number, at least 1."""
        return max(1, round(self.draw(draw)))

    @classmethod
    def parse(cls, text: str) -> Amount:
        first, *more = text.split("|")
        if not more and "@" not in first:
            return _one(first)
        return OneOf(tuple(_weighted(part) for part in (first, *more)))


@dataclass(frozen=True)
class Fixed(Amount):
    value: float

    def draw(self, draw: Random) -> float:
        return self.value


@dataclass(frozen=True)
class Uniform(Amount):
    least: float
    most: float

    def draw(self, draw: Random) -> float:
        return draw.uniform(self.least, self.most)


@dataclass(frozen=True)
class Exponential(Amount):
    mean: float
    most: float

    def draw(self, draw: Random) -> float:
        return min(self.most, draw.expovariate(1 / self.mean))


@dataclass(frozen=True)
class LogNormal(Amount):
    mean: float
    deviation: float
    most: float

    def draw(self, draw: Random) -> float:
        variance = math.log1p((self.deviation / self.mean) ** 2)
        return min(self.most, draw.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance)))


@dataclass(frozen=True)
class OneOf(Amount):
    parts: tuple[tuple[Amount, float], ...]  # with their weights

    def draw(self, draw: Random) -> float:
        amounts, weights = zip(*self.parts, strict=True)
        chosen: Amount = draw.choices(amounts, weights)[0]
        return chosen.draw(draw)


def _weighted(text: str) -> tuple[Amount, float]:
    amount, at, weight = text.partition("@")
    return _one(amount), _positive(weight) if at else 1.0


def _one(text: str) -> Amount:
    match text.split(":"):
        case ["exp", mean, most]:
            return Exponential(_positive(mean), _positive(most))
        case ["lognormal", mean, deviation, most]:
            return LogNormal(_positive(mean), _positive(deviation), _positive(most))
        case [number] if "-" in number:
            return _range(number)
        case [number]:
            return Fixed(_positive(number))
    raise ValueError(text)


def _range(text: str) -> Uniform:
    least, most = (_positive(end) for end in text.split("-"))
    if least > most:
        raise ValueError(text)
    return Uniform(least, most)


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number <= _MOST:
        raise ValueError(text)
    return number
