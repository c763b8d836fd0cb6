"""Sketches of prompts: the same everywhere, alike for prompts that are alike, and of bounded size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.scheduling.sketch import ENDS, MOST_HASHES, sketch_of

PROMPTS = st.lists(st.integers(0, 200_000), min_size=1, max_size=80)


def hashes(prompt: Sequence[int]) -> set[bytes]:
    found = sketch_of(prompt).hashes
    return {found[at : at + 4] for at in range(0, len(found), 4)}


@given(PROMPTS)
def test_at_most_a_few_numbers_each_once(prompt: list[int]) -> None:
    assert 1 <= len(hashes(prompt)) <= MOST_HASHES
    assert len(sketch_of(prompt).hashes) == 4 * len(hashes(prompt))
    assert sketch_of(tuple(prompt)) == sketch_of(prompt)


def test_it_is_the_same_on_every_machine() -> None:
    """Sketches come from gateways on other machines, perhaps with another version of numpy."""
    assert sketch_of((1000, 1001)).hashes.hex() == "d71fda72ea0e6095f064fbd0"


def test_prompts_of_the_same_words_are_more_alike_than_others() -> None:
    first, similar, foreign = range(50), [*range(45), *range(900, 905)], range(2000, 2050)
    assert len(hashes(first) & hashes(similar)) > MOST_HASHES / 2
    assert not hashes(first) & hashes(foreign)


def test_the_order_of_words_counts() -> None:
    assert sketch_of([1, 2, 3, 4]) != sketch_of([4, 3, 2, 1])


def test_of_a_long_document_both_ends_are_looked_at() -> None:
    start, middle, end = [*range(ENDS)], [*range(10_000, 20_000)], [*range(500, 500 + ENDS)]
    assert sketch_of([*start, *middle, *end]) == sketch_of([*start, *reversed(middle), *end])
    assert sketch_of([*start, *middle, *end]) != sketch_of([*start, *middle, *reversed(end)])


def test_the_first_imports_nothing() -> None:
    """An event loop makes it for the first chat: numpy brings some of its functions only when they are called."""
    code = "import sys; from alignedserve.scheduling.sketch import sketch_of; before = {*sys.modules}"
    code += "; sketch_of((1, 2, 3)); print({*sys.modules} - before)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
