"""Choose how a request is best kept on the device: as KV, as hidden vectors, or not at all (Apt-Serve §4.2, §5).

Hidden vectors take half of the memory, and every step makes K and V of them again, which delays all requests here.
To schedule request i is worth p, the time that i has been pending; as hidden vectors p - N·ρ·m, where N is the number
of requests here and ρ·m the time to make K and V of i. So a unit of memory brings, where hidden vectors take m/2:

    first half (hidden)     2p/m - 2Nρ
    second half (KV)        2Nρ
    all or nothing (KV)     p/m           where the first half would bring less than the second: p/m < 2Nρ

To take what brings most first, and in the end the better of that choice and the best single request, is worth at least
half of the best possible choice.
"""

# ruff: noqa: RUF002, RUF003  (formulas are in the papers' letters)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class CacheKind(Enum):
    KV = "kv"
    HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """The worth of a request, and the memory that the request takes."""

    value: float  # p, in seconds, less for a late request
    kv: int  # memory as KV, in whatever unit
    hidden: int  # memory as hidden vectors: about half, or as much where only KV is possible
    penalty: float  # N·ρ·m, in seconds
    is_sure: bool = False  # the request has memory as hidden, whatever that is worth

    def worth(self, kind: CacheKind | None) -> float:
        if kind is None:
            return 0.0
        return self.value if kind is CacheKind.KV else self.value - self.penalty

    def size(self, kind: CacheKind | None) -> int:
        if kind is None:
            return 0
        return self.kv if kind is CacheKind.KV else self.hidden


class _Gain(NamedTuple):
    """Memory that a request may get."""

    number: int  # of the request
    before: CacheKind | None  # what it must be kept as so far
    after: CacheKind


def assign(wishes: Sequence[MemoryWish], memory: int) -> list[CacheKind | None]:
    """Return the form in which each request is kept. Equal gains go by position, so older requests come first."""
    kinds: list[CacheKind | None] = [CacheKind.HIDDEN if wish.is_sure else None for wish in wishes]
    left = memory - sum(wish.hidden for wish in wishes if wish.is_sure)
    gains = [(number, gain) for number, wish in enumerate(wishes) for gain in _gains(number, wish, left)]
    ranked = sorted(gains, key=lambda gain: -_density(wishes[gain[0]], gain[1]))
    filled, free = list(kinds), left
    for number, gain in ranked:
        more = wishes[number].size(gain.after) - wishes[number].size(gain.before)
        if filled[number] is gain.before and more <= free:
            filled[number] = gain.after
            free -= more
    alone = max(ranked, key=lambda gain: _gained(wishes[gain[0]], kinds[gain[0]], gain[1].after), default=None)
    if alone is not None:
        number, gain = alone
        single = _gained(wishes[number], kinds[number], gain.after)
        if single > sum(_gained(*each) for each in zip(wishes, kinds, filled, strict=True)):
            kinds[number] = gain.after
            return kinds
    return filled


def _gains(number: int, wish: MemoryWish, memory: int) -> list[_Gain]:
    """Return the gains of a request that can fit, in the order in which they may be had.

    Each gain brings no more for its memory than the gain before."""
    if wish.is_sure:
        return [_Gain(number, CacheKind.HIDDEN, CacheKind.KV)] if wish.kv - wish.hidden <= memory else []
    first = _Gain(number, None, CacheKind.HIDDEN)
    second = _Gain(number, CacheKind.HIDDEN, CacheKind.KV)
    if pays_as_hidden(wish):
        return [first, *([second] if wish.kv <= memory else [])] if wish.hidden <= memory else []
    if wish.kv <= memory:
        return [_Gain(number, None, CacheKind.KV)]
    return [first] if wish.hidden <= memory and wish.worth(CacheKind.HIDDEN) > 0 and wish.hidden < wish.kv else []


def pays_as_hidden(wish: MemoryWish) -> bool:
    """Return whether the first half brings at least as much for its memory as the second (p/m >= 2Nρ)."""
    more = wish.kv - wish.hidden
    return more > 0 and (wish.value - wish.penalty) * more >= wish.penalty * wish.hidden


def _gained(wish: MemoryWish, before: CacheKind | None, after: CacheKind | None) -> float:
    return wish.worth(after) - wish.worth(before)


def _density(wish: MemoryWish, gain: _Gain) -> float:
    """Return what the gain brings for each unit of memory."""
    more = wish.size(gain.after) - wish.size(gain.before)
    return _gained(wish, gain.before, gain.after) / more if more else 0.0
