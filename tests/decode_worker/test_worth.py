"""The kind of cache that each request is kept as: within memory, and worth at least half of the best assignment."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.papers.memory.worth import CacheKind, MemoryWish, assign

KV, HIDDEN = CacheKind.KV, CacheKind.HIDDEN


@st.composite
def wishes(draw: st.DrawFn) -> MemoryWish:
    kv = draw(st.integers(1, 12))
    return MemoryWish(
        value=draw(st.integers(0, 40)) / 4,
        kv=kv,
        hidden=-(-kv // 2),
        penalty=draw(st.sampled_from((0.0, 0.05, 0.25, 1.0))) * kv,
        is_sure=draw(st.booleans()) and draw(st.booleans()),
    )


def base(some: list[MemoryWish]) -> list[CacheKind | None]:
    return [HIDDEN if wish.is_sure else None for wish in some]


def worth(some: list[MemoryWish], kinds: tuple[CacheKind | None, ...] | list[CacheKind | None]) -> float:
    return sum(wish.worth(kind) for wish, kind in zip(some, kinds, strict=True))


def size(some: list[MemoryWish], kinds: tuple[CacheKind | None, ...] | list[CacheKind | None]) -> int:
    return sum(wish.size(kind) for wish, kind in zip(some, kinds, strict=True))


def best(some: list[MemoryWish], memory: int) -> float:
    options = [(HIDDEN, KV) if wish.is_sure else (None, HIDDEN, KV) for wish in some]
    return max(worth(some, kinds) for kinds in product(*options) if size(some, kinds) <= memory)


@given(st.lists(wishes(), max_size=6), st.integers(0, 30))
def test_it_is_within_memory_and_worth_half_of_the_best(some: list[MemoryWish], more: int) -> None:
    memory = size(some, base(some)) + more
    kinds = assign(some, memory)
    assert size(some, kinds) <= memory
    assert all(kind is not None for wish, kind in zip(some, kinds, strict=True) if wish.is_sure)
    before = worth(some, base(some))
    assert 2 * (worth(some, kinds) - before) >= best(some, memory) - before - 1e-9


@given(st.lists(wishes(), max_size=6))
def test_with_memory_for_all_every_pending_request_has_kv(some: list[MemoryWish]) -> None:
    kinds = assign(some, sum(wish.kv for wish in some))
    assert all(kind is KV for wish, kind in zip(some, kinds, strict=True) if wish.value or wish.penalty)


def test_a_request_that_has_waited_long_is_taken_as_hidden_where_memory_is_short() -> None:
    waits = MemoryWish(value=10.0, kv=8, hidden=4, penalty=1.0)
    assert assign([waits, waits], 8) == [HIDDEN, HIDDEN]
    assert assign([waits, waits], 12) == [KV, HIDDEN]  # the older request gets KV
    assert assign([waits, waits], 16) == [KV, KV]


def test_where_others_would_pay_too_much_it_is_all_or_nothing() -> None:
    new = MemoryWish(value=1.0, kv=8, hidden=4, penalty=0.9)
    assert assign([new, new], 12) == [KV, None]


def test_the_best_request_alone_may_be_worth_more_than_many_small_ones() -> None:
    """The small request brings more for its memory, but leaves too little memory for the large request."""
    small, large = MemoryWish(1.0, kv=1, hidden=1, penalty=0.0), MemoryWish(9.0, kv=10, hidden=10, penalty=0.0)
    assert assign([small, large], 10) == [None, KV]


def test_a_request_that_is_here_keeps_what_it_has() -> None:
    here = MemoryWish(value=0.0, kv=8, hidden=4, penalty=1.0, is_sure=True)
    waits = MemoryWish(value=10.0, kv=8, hidden=4, penalty=1.0)
    assert assign([waits, here], 8) == [HIDDEN, HIDDEN]
    assert assign([here], 7) == [HIDDEN]
    assert assign([here], 8) == [KV]
