"""Past prompts: exactly those that brute force finds most similar, and never more than the limit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.router.prediction.neighbours import MOST_SEEN, PastPrompts

VECTORS = st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=30)


def vector(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int8)


def squared(first: list[int], second: list[int]) -> Fraction:
    """Return the square of the cosine as an exact fraction: none of these numbers is negative."""
    norms = max(1, sum(a * a for a in first)) * max(1, sum(b * b for b in second))
    return Fraction(sum(a * b for a, b in zip(first, second, strict=True)) ** 2, norms)


@given(vectors=VECTORS, asked=VECTORS, k=st.integers(1, 9))
@settings(deadline=None)
def test_the_most_similar_of_all(vectors: list[list[int]], asked: list[list[int]], k: int) -> None:
    past = PastPrompts(6)
    for numbers in vectors:
        past.add(vector(*numbers), 1, 1)
    known = [list(map(int, row)) for row in past.vectors]
    found, similarity = past.similar(np.array(asked, dtype=np.int8), k)
    for row, numbers in enumerate(asked):
        best = sorted((squared(numbers, stored) for stored in known), reverse=True)[:k]
        entries = [int(entry) for entry in found[row] if entry >= 0]
        assert len(entries) == len(set(entries)) == min(k, len(known))
        assert sorted((squared(numbers, known[entry]) for entry in entries), reverse=True) == best
        assert similarity[row, : len(entries)] == pytest.approx([float(square) ** 0.5 for square in best])


def test_of_two_that_are_as_similar_the_older_comes_first() -> None:
    for count in range(1, 5):
        past = PastPrompts(4)
        for at in range(4):
            past.add(vector(*(int(at == place) for place in range(4))), 1, at + 1)
        assert past.similar(np.array([vector(1, 1, 1, 1)]), count)[0].tolist() == [list(range(count))]


def test_equal_prompts_are_one_entry_with_the_mean_of_what_came_of_them() -> None:
    past = PastPrompts(2)
    for length in (10, 20, 60):
        past.add(vector(1, 2), 5, length)
    assert len(past) == 1
    assert past.means.tolist() == [30.0]
    assert past.last[0] == 60


def test_what_came_of_a_prompt_long_ago_fades() -> None:
    past = PastPrompts(2)
    for length in [10] * MOST_SEEN + [100] * 10 * MOST_SEEN:
        past.add(vector(1, 2), 5, length)
    assert past.means[0] == pytest.approx(100, abs=2)


def test_the_oldest_entry_makes_room() -> None:
    past = PastPrompts(2, capacity=3)
    for number in range(1, 6):
        past.add(vector(number, 1), number, number)
    assert len(past) == 3
    assert sorted(past.num_prompt[:3]) == [3, 4, 5]
    past.add(vector(1, 1), 9, 9)
    assert sorted(past.num_prompt[:3]) == [4, 5, 9], "one that was forgotten is new"
    assert past.num_prompt[past.in_order()].tolist() == [4, 5, 9]


def test_it_grows_up_to_its_capacity() -> None:
    past = PastPrompts(16, capacity=3000)
    draw = np.random.default_rng(0)
    for _ in range(4000):
        past.add(draw.integers(-100, 100, 16, dtype=np.int8), 1, 1)
    assert len(past) == len(past.vectors) == 3000


def test_numbers_with_inexact_products_are_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        PastPrompts(2000).add(np.full(2000, 127, dtype=np.int8), 1, 1)
