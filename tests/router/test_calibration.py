"""Tests that the predictor corrects itself: upper estimates hold after a shift, and it drops useless predictions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from random import Random

import numpy as np
import pytest

from alignedserve.core import Estimate, Sketch
from alignedserve.router.prediction.length import FitTimes
from alignedserve.router.prediction.predictor import HashEncoder, LengthModel
from tests.rare import rare, thinned

Asked = tuple[Sketch, int]  # what is known of a prompt, and the length of its output
KINDS, WORDS = 4, 24
BLOCK = 500


def sketch_of_kind(kind: int, draw: Random) -> Sketch:
    """Return the counts of words: a word of its kind, and some that tell nothing."""
    counts = [0] * WORDS
    counts[kind] = 3
    for word in draw.choices(range(KINDS, WORDS), k=4):
        counts[word] += 1
    return Sketch(bytes(counts))


def traffic(seed: int, mean: Callable[[int], float], spread: float = 0.7) -> Iterator[Asked]:
    """Yield requests of several kinds, each with its own mean length."""
    draw = Random(seed)
    while True:
        kind = draw.randrange(KINDS)
        yield sketch_of_kind(kind, draw), max(1, round(mean(kind) * draw.lognormvariate(0, spread)))


def new_model() -> LengthModel:
    return LengthModel(HashEncoder(WORDS))


def told(model: LengthModel, asked: Iterable[Asked], fits: FitTimes) -> list[tuple[Estimate | None, int]]:
    """Predict each request, then learn it, as the router orders."""
    found = []
    for sketch, length in asked:
        found.append((model.predict([sketch], [20])[0], length))
        model.learn([sketch], [20], [length])
        if fits.is_due():
            model.fit()
    return found


def grows(kind: int) -> float:
    return float(20 * 3**kind)


def falls(kind: int) -> float:
    return grows(KINDS - 1 - kind)


def same(_: int) -> float:
    return 150.0


def ten_times(kind: int) -> float:
    return 10 * grows(kind)


def a_tenth(kind: int) -> float:
    return max(3.0, grows(kind) / 10)


def coverage(found: Iterable[tuple[Estimate | None, int]]) -> float:
    known = [(estimate, length) for estimate, length in found if estimate is not None]
    return sum(length <= estimate.upper for estimate, length in known) / len(known)


@pytest.mark.parametrize("after", thinned([a_tenth, ten_times, falls, same], usual=1))
def test_nine_of_ten_end_within_the_upper_estimate_soon_after_a_shift(after: Callable[[int], float]) -> None:
    model, fits = new_model(), FitTimes()
    told(model, islice(traffic(1, grows), 1000), fits)
    found = told(model, islice(traffic(2, after), 2 * BLOCK), fits)
    assert 0.85 <= coverage(found[BLOCK:]) <= 0.95


def test_nine_of_ten_end_within_it_where_nothing_changes() -> None:
    found = told(new_model(), islice(traffic(3, grows), 2 * BLOCK), FitTimes())
    assert 0.85 <= coverage(found[BLOCK:]) <= 0.95


class TestUse:
    def test_predictions_that_tell_kinds_apart_are_used(self) -> None:
        model = new_model()
        told(model, islice(traffic(4, grows), 400), FitTimes())
        means = [self._said(model, kind).mean for kind in range(KINDS)]
        assert all(2 * less < more for less, more in pairwise(means))

    def test_an_answer_of_a_single_token_is_told_from_one_of_two(self) -> None:
        model = new_model()
        told(model, islice(traffic(4, lambda kind: 1 + kind % 2, spread=0), 200), FitTimes())
        assert [self._said(model, kind).mean for kind in range(KINDS)] == [1, 2, 1, 2]

    def test_where_words_tell_nothing_every_prompt_gets_the_same_estimate(self) -> None:
        model = new_model()
        told(model, islice(traffic(5, same), 600), FitTimes())
        [said] = {self._said(model, kind) for kind in range(KINDS)}
        assert 150 < said.mean < 250

    def test_predictions_that_have_become_wrong_are_withdrawn_within_64_requests_and_the_log_says_so(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, fits = new_model(), FitTimes()
        with caplog.at_level("INFO", logger="alignedserve.predictor"):
            told(model, islice(traffic(6, grows), 1000), fits)
            told(model, islice(traffic(7, falls), 80), fits)
        assert len({self._said(model, kind) for kind in range(KINDS)}) == 1
        first, *_, last = (record.getMessage() for record in caplog.records)
        assert re.fullmatch(
            r"lengths are predicted: of recent outputs \d+% of pairs are in order, \d+% within .*", first
        )
        assert last.startswith("all outputs are predicted alike: of recent outputs ")

    @rare
    def test_they_come_back_when_the_new_lengths_are_learnt(self) -> None:
        model, fits = new_model(), FitTimes()
        told(model, islice(traffic(6, grows), 500), fits)
        told(model, islice(traffic(7, falls), 1500), fits)
        assert self._said(model, 0).mean > 2 * self._said(model, KINDS - 1).mean

    def _said(self, model: LengthModel, kind: int) -> Estimate:
        [said] = model.predict([sketch_of_kind(kind, Random("asked"))], [20])
        assert said is not None
        return said


def test_an_upper_estimate_is_never_below_the_mean() -> None:
    found = told(new_model(), islice(traffic(8, grows), 300), FitTimes())
    assert all(1 <= estimate.mean <= estimate.upper for estimate, _ in found if estimate is not None)
    assert np.mean([estimate is not None for estimate, _ in found]) > 0.8
