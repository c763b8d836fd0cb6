"""A fit counts only what has changed since the last one, and gives what a fit to all of the newest prompts gives."""

from __future__ import annotations

import numpy as np
import pytest

from alignedserve.router.prediction.neighbours import Floats, Ints, PastPrompts
from alignedserve.router.prediction.predictor import NewestPrompts
from alignedserve.router.prediction.ridge import Ridge

DIMENSIONS, KINDS = 8, 60


class Fitted:
    """A regression that is fitted to the newest of a past."""

    def __init__(self, past: PastPrompts) -> None:
        self.past, self.ridge = past, Ridge(DIMENSIONS)
        self.num_counted = 0
        self._newest = NewestPrompts(past, self.ridge, self._inputs)

    def fit(self, most: int) -> None:
        self._newest.fit(self.past.in_order()[-most:])

    def _inputs(self, entries: Ints) -> Floats:
        self.num_counted += len(entries)
        return self.past.vectors[entries].astype(np.float64) / 4


@pytest.mark.parametrize("capacity", [1000, 40])  # in the second, entries that count make room for others
def test_fits_one_after_the_other_give_what_one_fit_gives(capacity: int) -> None:
    draw = np.random.default_rng(0)
    kinds = draw.integers(-7, 8, (KINDS, DIMENSIONS)).astype(np.int8)
    past = PastPrompts(DIMENSIONS, capacity)
    often = Fitted(past)
    for _ in range(20):
        for kind in draw.integers(0, KINDS, 25):
            past.add(kinds[kind], 5, int(draw.integers(1, 500)))
        often.fit(most=30)
        once = Fitted(past)
        once.fit(most=30)
        assert often.ridge.lengths(kinds / 4).tobytes() == once.ridge.lengths(kinds / 4).tobytes()


def test_a_fit_looks_only_at_what_is_new() -> None:
    past = PastPrompts(DIMENSIONS)
    fitted = Fitted(past)
    for at in range(100):
        past.add(np.full(DIMENSIONS, at, np.int8), 5, at + 1)
    fitted.fit(most=1000)
    past.add(np.full(DIMENSIONS, 100, np.int8), 5, 7)
    fitted.fit(most=1000)
    assert fitted.num_counted == 101
