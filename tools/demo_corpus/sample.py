"""What a training conversation is, and the one source of chance that makes it.

Every generator in this package is a function `(draw: Draw) -> Sample`. A `Draw` owns the random
state and knows on which side of the fence it stands: what a HELD_OUT draw hands out (names, words,
numbers, list lengths, document layouts) a TRAIN draw never does. So a held-out prompt is new by
construction, not by luck.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")

HELD_OUT_SHARE = 8  # one value in eight is kept from training


class Split(Enum):
    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class Turn:
    user: str
    assistant: str


@dataclass(frozen=True)
class Sample:
    """A conversation. An evaluation compares its last answer."""

    kind: str
    turns: tuple[Turn, ...]
    system: str | None = None
    asked: int | None = None  # the length the prompt asks for (numbers, items, sentences), if it does

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the conversation up to the last question, as `apply_chat_template` takes it."""
        told = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[:-1]:
            told.append({"role": "user", "content": turn.user})
            told.append({"role": "assistant", "content": turn.assistant})
        return [*told, {"role": "user", "content": self.turns[-1].user}]

    @property
    def answer(self) -> str:
        return self.turns[-1].assistant


def split_of(value: object) -> Split:
    """Return the side of a value, training or held out: the same in every run and on every machine."""
    reserved = crc32(str(value).encode()) % HELD_OUT_SHARE == 0
    return Split.HELD_OUT if reserved else Split.TRAIN


class Draw:
    """Seeded chance that draws values of its own side only."""

    def __init__(self, seed: int | str, split: Split) -> None:
        self.random = random.Random(seed)
        self.split = split

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def choose(self, options: Sequence[T]) -> T:
        """Return any of `options`: for options that both sides share (phrasings, kinds, categories)."""
        return options[self.random.randrange(len(options))]

    def own(self, options: Sequence[T]) -> T:
        """Return one of the `options` that belong to this side."""
        return self.fresh(lambda: self.choose(options))

    def fresh(self, make: Callable[[], T]) -> T:
        """Call `make` until the value belongs to this side, and return the value."""
        for _ in range(1000):
            value = make()
            if split_of(value) is self.split:
                return value
        raise ValueError(f"no {self.split.value} value in 1000 tries, the last was {value!r}; widen its range")
