"""Copies that are collected and then made, order by order, mean the same as single copies in the order of the plan."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from alignedserve.papers.memory.block_ends import SlotCopies

NUMBERS = st.integers(-4, 4)  # slots, and below 0 places
COPIES = st.lists(st.tuples(NUMBERS, NUMBERS).filter(lambda copy: copy[0] != copy[1] and max(copy) >= 0))


@given(copies=COPIES)
@example(copies=[(-1, 0), (0, 1), (1, -1)])
@settings(deadline=None)
def test_any_copies(copies: list[tuple[int, int]]) -> None:
    collected = SlotCopies()
    memory = {number: f"from {number}" for number in range(-4, 5)}
    wanted = dict(memory)
    for source, target in copies:
        collected.add(source, target)
        wanted[target] = wanted[source]
    orders = collected.take()
    for order in orders:
        new = {~place: memory[slot] for slot, place in order.checkpoints}
        new |= {slot: memory[~place] for place, slot in order.restores}
        memory |= new | {target: memory[source] for source, target in order.moves}
    assert memory == wanted
    assert not collected.take()


def test_copies_that_do_not_meet_are_one_order() -> None:
    collected = SlotCopies()
    for source, target in ((0, -1), (2, 0), (-1, 3)):
        collected.add(source, target)
    first, second = collected.take()
    assert (first.checkpoints, first.moves, first.restores) == (((0, 0),), ((2, 0),), ())
    assert second.restores == ((0, 3),)
