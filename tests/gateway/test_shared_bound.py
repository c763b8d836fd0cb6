"""Tests of a bound that callers share: each leaves room to the next, and a heavier one may hold more."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.gateway.access.keys import ANONYMOUS, Caller, Limits
from alignedserve.gateway.access.shared_bound import SharedBound

MOST = 120


def key(name: str, weight: int = 1) -> Caller:
    return Caller(name, limits=Limits(weight=weight))


def fill(bound: SharedBound, caller: Caller) -> int:
    """Let the caller take what it can, and return how much that was."""
    taken = 0
    while bound.take(caller, 1, MOST):
        taken += 1
    return taken


def test_each_leaves_as_much_as_it_holds() -> None:
    bound, names = SharedBound(), ("ann", "bob", "cat")
    assert [fill(bound, key(name)) for name in names] == [60, 30, 15]
    for name, amount in zip(names, (60, 30, 15), strict=True):
        bound.give(key(name), amount)
    assert [sum(bound.take(key(name), 1, MOST) for _ in range(30)) for name in names] == [30] * 3
    assert [fill(bound, key(name)) for name in names] == [0] * 3


def test_a_heavier_key_may_hold_more() -> None:
    bound, ann, bob = SharedBound(), key("ann", 3), key("bob")
    assert bound.take(bob, 1, MOST)
    assert (fill(bound, ann), fill(bound, bob)) == (71, 23)


def test_a_key_at_its_brim_may_hold_less_while_others_hold_much() -> None:
    bound, ann, bob = SharedBound(), key("ann"), key("bob")
    assert (fill(bound, ann), fill(bound, bob)) == (60, 30)
    assert bound.take(ann, -10, MOST)
    assert not bound.take(ann, 1, MOST)


def test_who_is_alone_on_the_server_may_hold_all() -> None:
    assert fill(SharedBound(), ANONYMOUS) == MOST


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.booleans()), max_size=60), st.integers(1, 9))
def test_a_key_that_comes_last_has_half_of_what_is_free(works: list[tuple[int, int, bool]], weight: int) -> None:
    bound, held = SharedBound(), Counter[int]()
    for number, amount, gives in works:
        caller = key(str(number), number + 1)
        if gives:
            amount = min(amount, held[number])
            bound.give(caller, amount)
            held[number] -= amount
        elif bound.take(caller, amount, MOST):
            held[number] += amount
        assert held.total() < MOST
    last, half = key("last", weight), (MOST - held.total()) // 2
    assert bound.take(last, half, MOST)
    bound.give(last, half)
    for number, amount in held.items():
        bound.give(key(str(number)), amount)
    assert fill(bound, ANONYMOUS) == MOST, "all came back"
