"""Amounts that are drawn for each use: the tokens of a prompt, the turns of a conversation, the seconds of a deadline.

200                        always 200
512-1024                   uniform
exp:60:400                 exponential with mean 60, cut at 400
lognormal:223:256:2048     log-normal with mean 223 and deviation 256, cut at 2048
10-999@0.9|1000-8000@0.1   one of several amounts, by weight; the default weight is 1
"""

# ruff: noqa: RUF009  (what it takes for shared defaults are frozen, or fields made by `setting`)

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from alignedserve.config.setting import setting

_MOST = 1e9
FORMS = (
    "written 200, 512-1024, exp:MEAN:MOST, lognormal:MEAN:DEVIATION:MOST or several of them as A@WEIGHT|B@WEIGHT, "
    "of numbers above 0 and up to a billion"
)


class Amount(ABC):
    """A distribution of numbers above 0 and up to a billion; larger numbers are surely mistakes."""

    @abstractmethod
    def draw(self, draw: Random) -> float: ...

    def count(self, draw: Random) -> int:
        """Draw a whole number, at least 1."""
        return max(1, round(self.draw(draw)))

    @classmethod
    def parse(cls, text: str) -> Amount:
        first, *more = text.split("|")
        if not more and "@" not in first:
            return _parse_part(first)
        return OneOf(tuple(_parse_weighted(part) for part in (first, *more)))


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


def _parse_weighted(text: str) -> tuple[Amount, float]:
    amount, at, weight = text.partition("@")
    return _parse_part(amount), _parse_positive(weight) if at else 1.0


def _parse_part(text: str) -> Amount:
    match text.split(":"):
        case ["exp", mean, most]:
            return Exponential(_parse_positive(mean), _parse_positive(most))
        case ["lognormal", mean, deviation, most]:
            return LogNormal(_parse_positive(mean), _parse_positive(deviation), _parse_positive(most))
        case [number] if "-" in number:
            return _parse_range(number)
        case [number]:
            return Fixed(_parse_positive(number))
    raise ValueError(text)


def _parse_range(text: str) -> Uniform:
    least, most = (_parse_positive(end) for end in text.split("-"))
    if least > most:
        raise ValueError(text)
    return Uniform(least, most)


def _parse_positive(text: str) -> float:
    number = float(text)
    if not 0 < number <= _MOST:
        raise ValueError(text)
    return number


Pair = tuple[int, int]  # prompt and output

CHAT_PROMPT = LogNormal(223, 256, 2048)  # ShareGPT, as BROS §6 measured it
CHAT_OUTPUT = LogNormal(235, 269, 1024)


class LengthSource(Protocol):
    def pair(self, number: int, draw: Random, turn: int = 0) -> Pair:
        """Return the lengths for this turn of the visit of this number."""


@dataclass(frozen=True)
class DrawnSizes:
    """Lengths of prompts and outputs that are drawn independently of each other."""

    prompt: Amount = setting(CHAT_PROMPT, f"tokens of a prompt, {FORMS}")
    output: Amount = setting(CHAT_OUTPUT, f"tokens of an output, {FORMS}")

    def pair(self, number: int, draw: Random, turn: int = 0) -> Pair:
        return self.prompt.count(draw), self.output.count(draw)


@dataclass(frozen=True)
class Scaled:
    """Lengths of another source, times a factor."""

    lengths: LengthSource
    factor: float

    def pair(self, number: int, draw: Random, turn: int = 0) -> Pair:
        prompt, output = self.lengths.pair(number, draw, turn)
        return max(1, round(self.factor * prompt)), max(1, round(self.factor * output))


@dataclass(frozen=True)
class ShortLong:
    """Short and long prompts (AlignedServe §4: short below 1,000 tokens, long 1,000 to 8,000)."""

    short: float = setting(0.9, "share of the short prompts", least=0, most=1)
    short_prompt: Amount = setting(Uniform(10, 999), f"tokens of a short prompt, {FORMS}")
    long_prompt: Amount = setting(Uniform(1000, 8000), f"tokens of a long prompt, {FORMS}")
    output: Amount = setting(CHAT_OUTPUT, f"tokens of an output, {FORMS}")

    def pair(self, number: int, draw: Random, turn: int = 0) -> Pair:
        prompt = self.short_prompt if draw.random() < self.short else self.long_prompt
        return prompt.count(draw), self.output.count(draw)


@dataclass(frozen=True)
class Sampled:
    """Lengths drawn at random from recorded pairs."""

    pairs: tuple[Pair, ...] = field(repr=False)

    def pair(self, number: int, draw: Random, turn: int = 0) -> Pair:
        return draw.choice(self.pairs)


@dataclass(frozen=True)
class RecordedLengths:
    """Recorded lengths, in the recorded order."""

    pairs: tuple[Pair, ...] = field(repr=False)

    def pair(self, number: int, draw: Random, turn: int = 0) -> Pair:
        return self.pairs[number]
