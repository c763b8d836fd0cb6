"""Sketches of prompts: the same everywhere, alike for prompts that are alike, of one size for all lengths."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.scheduling.sketch import DIMENSIONS, ENDS, sketch_of

PROMPTS = st.lists(st.integers(0, 200_000), min_size=1, max_size=80)


def counts(prompt: list[int]) -> np.ndarray:
    return np.frombuffer(sketch_of(prompt).counts, dtype=np.int8).astype(int)


@given(PROMPTS)
def test_small_integers_of_one_number(prompt: list[int]) -> None:
    assert len(counts(prompt)) == DIMENSIONS
    assert set(counts(prompt)) <= {0, 1, 2, 3}
    assert sketch_of(tuple(prompt)) == sketch_of(prompt)


def test_it_is_the_same_on_every_machine() -> None:
    """Knowledge that is kept over a restart was made by another process, perhaps with another version of numpy."""
    digest = blake2b(sketch_of(range(1000, 1100)).counts, digest_size=8).hexdigest()
    assert digest == "b3ca2f82a0856c27"


def test_prompts_of_the_same_words_are_more_alike_than_others() -> None:
    first, similar, foreign = counts([*range(50)]), counts([*range(45), *range(900, 905)]), counts([*range(2000, 2050)])

    def similarity(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    assert similarity(first, similar) > 0.8 > 0.4 > similarity(first, foreign)


def test_the_order_of_words_counts() -> None:
    assert sketch_of([1, 2, 3, 4]) != sketch_of([4, 3, 2, 1])


def test_of_a_long_document_both_ends_are_looked_at() -> None:
    start, middle, end = [*range(ENDS)], [*range(10_000, 20_000)], [*range(500, 500 + ENDS)]
    assert sketch_of([*start, *middle, *end]) == sketch_of([*start, *reversed(middle), *end])
    assert sketch_of([*start, *middle, *end]) != sketch_of([*start, *middle, *reversed(end)])
