"""Tokens for prompts: pieces of one long tape of random tokens, so that a long prompt costs no more than a copy."""

from __future__ import annotations

from functools import cache
from random import Random

from alignedserve.simulator.machines.engine import VOCABULARY

_LENGTH = 1 << 16
_HEAD = 8  # tokens at the start of a piece, drawn for it alone, so that no two pieces share a prefix
_WORDS = range(1, VOCABULARY)  # 0 ends an output


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
