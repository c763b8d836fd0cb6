"""The lengths of prompts and outputs, in tokens."""

# ruff: noqa: RUF009  (what it takes for shared defaults are frozen, or fields made by `setting`)

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from alignedserve.config.setting import setting
from alignedserve.loads.workload.amounts import FORMS, Amount, LogNormal, Uniform

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
