"""The messages that only a form of KV needs, and who may send them (protocol/messages.py has all others)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from alignedserve.core import Entry, Role

_Attempts: TypeAlias = tuple[tuple[str, int], ...]  # each the name of a request, and the number of its attempt


@dataclass(frozen=True, slots=True)
class Compress:
    """The pool orders to write the KV of these full pages to the pages `into`, as int8, when nothing else is due.

    A worker has at most one such order, and the pages are leased to it until it has answered. A later order has a
    larger number; an order that comes again asks for the answer again.
    """

    number: int
    pages: tuple[int, ...]
    into: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compressed:
    """The answer: which pages are compressed. The others did not hold what they should, or cannot be int8."""

    number: int
    done: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A decode worker tells a prefill worker that can send KV which requests will join, in order.

    The prefill worker copies the KV from the pool's pages while there is room, and keeps the copy until a Pull or a
    Cancel. The pool keeps the KV, too.
    """

    entries: tuple[Entry, ...]
    waits_s: tuple[float, ...]  # expected, until each joins


@dataclass(frozen=True, slots=True)
class Evict:
    """A decode worker tells a prefill worker that this request has to leave the device.

    A receiver with room pulls the KV (Pull, with its own number), and holds it like prefetched KV; the pool does not
    have this KV. The decode worker keeps all else of the request, and can recompute the KV.
    """

    entry: Entry  # without pages
    wait_s: float  # expected, until the request joins again


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The answer to Prefetch and Evict, as each KV arrives: Pull works for these from now on. The answer is repeated
    while the KV is there."""

    attempts: _Attempts


@dataclass(frozen=True, slots=True)
class PrefetchDeclined:
    """A prefill worker has no room, or no more room, for these attempts; the KV is only in the pool, if anywhere."""

    attempts: _Attempts


FormMessage: TypeAlias = Compress | Compressed | Prefetch | Evict | Prefetched | PrefetchDeclined
FORM_SPEECH: Mapping[Role, tuple[type, ...]] = MappingProxyType(
    {
        Role.POOL: (Compress,),
        Role.PREFILL: (Compressed, Prefetched, PrefetchDeclined),
        Role.DECODE: (Compressed, Prefetch, Evict),
    }
)
