"""Tokens for prompts: pieces of one long tape of random tokens, so that a long prompt costs no more than a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from random import Random

BLOCK = 512  # tokens of a block that prompts share
_LENGTH = 1 << 16
_HEAD = 8  # tokens at the start of a piece, drawn for it alone, so that no two pieces share a prefix
STOP = 0  # the token that ends an output
VOCABULARY = 1000
_WORDS = range(1, VOCABULARY)


@dataclass(frozen=True)
class StreamText:
    """The tokens of a stream's prompts."""

    seed: str
    num_system: int  # tokens that all its prompts begin with
    blocks: Sequence[Sequence[int]] = ()  # ids of the blocks of each request's prompt; none: no prompts share any

    @cached_property
    def system(self) -> tuple[int, ...]:
        return words(Random(f"{self.seed}/system"), self.num_system)

    def prompt(self, number: int, length: int, draw: Random) -> tuple[int, ...]:
        if not self.blocks:
            return words(draw, length)
        needed = self.blocks[number][: -(-length // BLOCK)]
        return tuple(chain.from_iterable(map(self._block, needed)))[:length]

    def _block(self, block: int) -> tuple[int, ...]:
        return words(Random(f"{self.seed}/block {block}"), BLOCK)


def words(draw: Random, length: int) -> tuple[int, ...]:
    head = tuple(draw.choices(_WORDS, k=min(length, _HEAD)))
    return head + _read(draw.randrange(_LENGTH), length - len(head))


def _read(start: int, length: int) -> tuple[int, ...]:
    """Return a piece of the tape; after its end the tape begins again."""
    piece = _tape()[start : start + length]
    while len(piece) < length:
        piece += _tape()[: length - len(piece)]
    return piece


@cache
def _tape() -> tuple[int, ...]:
    return tuple(Random("tape").choices(_WORDS, k=_LENGTH))
