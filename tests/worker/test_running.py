"""Block pairs: each is free or taken once, and the pair that was given back last is taken first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.worker.step.blocks import Blocks

NUM_PAIRS = 12


@given(st.lists(st.integers(0, NUM_PAIRS + 1), max_size=60))
def test_pairs_are_taken_and_given_back_as_from_one_pile(counts: list[int]) -> None:
    """The given number of pairs is taken each time; where fewer are free, the pairs that were taken first go back."""
    blocks, pile, taken = Blocks(NUM_PAIRS), list(range(NUM_PAIRS))[::-1], list[tuple[int, ...]]()
    for count in counts:
        pairs = blocks.take(count)
        if count > len(pile):
            assert pairs is None
            if taken:
                back = taken.pop(0)
                blocks.give(back)
                pile += back
        else:
            assert pairs == tuple(pile.pop() for _ in range(count))
            taken.append(pairs)
        assert blocks.num_free == len(pile)
        assert sorted(blocks.free) == sorted(pile)
