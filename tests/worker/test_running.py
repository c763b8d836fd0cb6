"""Blocks: each is free or taken once, and the block that was given back last is taken first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.worker.step.blocks import Blocks

NUM_BLOCKS = 12


@given(st.lists(st.integers(0, NUM_BLOCKS + 1), max_size=60))
def test_blocks_are_taken_and_given_back_as_from_one_pile(counts: list[int]) -> None:
    """The given number of blocks is taken each time; where fewer are free, the blocks that were taken first go back."""
    store, pile, taken = Blocks(NUM_BLOCKS), list(range(NUM_BLOCKS))[::-1], list[tuple[int, ...]]()
    for count in counts:
        blocks = store.take(count)
        if count > len(pile):
            assert blocks is None
            if taken:
                back = taken.pop(0)
                store.give(back)
                pile += back
        else:
            assert blocks == tuple(pile.pop() for _ in range(count))
            taken.append(blocks)
        assert store.num_free == len(pile)
        assert sorted(store.free) == sorted(pile)
