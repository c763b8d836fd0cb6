"""The predictor's correction by recent outputs: each is compared with the prediction before it was learnt.

    is_useful         whether predictions put pairs of outputs in order more often than chance does. Where they do not,
                      every prompt gets the same mean: an order by chance is worse than none
    least_similarity  s0: neighbours as similar as this are asked, and the regression where there is none
    factor            mean of outputs / mean of what the regression says, since it knows their logarithms
    beyond            how far beyond a prediction nine of ten outputs end (conformal prediction), apart for ranges of
                      predictions, since short answers are predicted more surely than long ones

The share of outputs that may end beyond moves with each output: down when it has ended beyond, up when it has not
(adaptive conformal inference, Gibbs and Candès 2021). So the upper estimate holds soon after the traffic has changed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

import numpy as np

from alignedserve.router.prediction.neighbours import Floats, Ints
from alignedserve.router.prediction.ridge import length_of, log_of

COVERED = 0.9  # share of outputs that are no longer than the upper estimate
WINDOW = 512  # newest outputs, by which predictions are corrected
SIMILARITIES = (0.7, 0.8, 0.9, 0.95, 0.99)  # below that the regression is better on unseen texts
_ORDERED = 256  # newest outputs, whose pairs predictions must put in order
_NOW, _OFF = 16, 1.25  # newest outputs, and how much further off than the mean predictions may be for them
_LEAST_ORDERED = 32  # with fewer outputs predictions are not used
_SURE = 0.7  # two standard deviations of the share of pairs in order by chance, times the root of their outputs
_STEP = 0.01  # by which an output moves the share that may end beyond
_LEAST_BEYOND, _MOST_BEYOND = 0.005, 0.4
_RANGES = 4  # ranges of predictions, with as many outputs each
_LEAST_RESIDUALS = 32  # a range with fewer takes the residuals of all ranges
_MOST_FACTOR = 4.0


class Opinions(NamedTuple):
    """The estimates of each prompt's output, in tokens: by past prompts, and by the regression."""

    similarity: Floats  # of the nearest past prompts, best first: [prompts, k]
    by_past: Floats  # mean output of the nearest one, of the two nearest, ...: [prompts, k]
    by_ridge: Floats  # what the regression says: [prompts]


@dataclass(frozen=True)
class Calibration:
    mean: float  # of outputs
    is_useful: bool = False
    least_similarity: float = 0.7
    factor: float = 1.0
    edges: tuple[float, ...] = ()  # logarithms between the ranges of predictions
    beyond: tuple[float, ...] = (1.0,)  # logarithms, of each range
    in_order: float = 0.5  # share of pairs of the newest outputs that its means put in order
    covered: float = COVERED  # share of the newest outputs that were no longer than the upper estimate

    def means(self, opinions: Opinions) -> Floats:
        if not self.is_useful:
            return np.full(len(opinions.by_ridge), self.mean)
        num_near = (opinions.similarity >= self.least_similarity).sum(axis=1)
        by_past = opinions.by_past[np.arange(len(num_near)), np.maximum(0, num_near - 1)]
        return np.where(num_near > 0, by_past, opinions.by_ridge * self.factor)

    def uppers(self, means: Floats) -> Floats:
        logs = log_of(whole(means))
        return length_of(logs + np.array(self.beyond)[np.searchsorted(self.edges, logs, side="right")])


class RecentOutputs:
    """The newest outputs, each with the opinions that there were before it."""

    def __init__(self, num_nearest: int) -> None:
        self._similarity, self._by_past = np.zeros((WINDOW, num_nearest)), np.zeros((WINDOW, num_nearest))
        self._by_ridge, self._actual = np.zeros(WINDOW), np.ones(WINDOW, dtype=np.int64)
        self._num_ever = 0
        self._beyond = 1 - COVERED  # share of outputs that may end beyond the upper estimate
        self._covered = deque[bool](maxlen=_ORDERED)

    def add(self, opinions: Opinions, uppers: Floats, actual: Ints) -> None:
        for similarity, by_past, by_ridge, upper, length in zip(*opinions, uppers, map(int, actual), strict=True):
            row = self._num_ever % WINDOW
            self._similarity[row], self._by_past[row] = similarity, by_past
            self._by_ridge[row], self._actual[row] = by_ridge, length
            self._num_ever += 1
            self._covered.append(length <= upper)
            moved = self._beyond + _STEP * (1 - COVERED - (length > upper))
            self._beyond = min(_MOST_BEYOND, max(_LEAST_BEYOND, moved))

    @property
    def mean(self) -> float | None:
        """Return the mean of these outputs; None if there are few."""
        num = min(self._num_ever, WINDOW)
        return float(self._actual[:num].sum() / num) if num >= _LEAST_ORDERED else None

    def calibrated(self, mean: float) -> Calibration:
        """Return the calibration by these outputs; `mean` is what prompts get where nothing better is known."""
        rows = np.arange(max(0, self._num_ever - WINDOW), self._num_ever) % WINDOW  # the oldest first
        if not len(rows):
            return Calibration(mean)
        opinions = Opinions(self._similarity[rows], self._by_past[rows], self._by_ridge[rows])
        actual = self._actual[rows]
        logs = log_of(actual)
        best = min(_choices(mean, opinions, actual), key=lambda choice: _error(choice.means(opinions), logs))
        in_order, covered = _in_order(best, opinions, logs), sum(self._covered) / len(self._covered)
        is_useful = _is_useful(best, opinions, logs, in_order)
        chosen = replace(best, is_useful=is_useful, in_order=in_order, covered=covered)
        predicted = log_of(whole(chosen.means(opinions)))
        edges, beyond = _beyond_by_range(predicted, logs - predicted, 1 - self._beyond)
        return replace(chosen, edges=edges, beyond=beyond)


def _choices(mean: float, opinions: Opinions, actual: Ints) -> list[Calibration]:
    factor = float(actual.sum() / whole(opinions.by_ridge).sum())
    factor = min(_MOST_FACTOR, max(1 / _MOST_FACTOR, factor))
    return [Calibration(mean, True, least, factor) for least in SIMILARITIES]


def _error(means: Floats, logs: Floats) -> float:
    """Return how far the predictions are from the outputs, rounded so that the order of the sum does not matter."""
    return float(np.rint(1024 * np.abs(log_of(whole(means)) - logs)).sum())


def _is_useful(found: Calibration, opinions: Opinions, logs: Floats, in_order: float) -> bool:
    """Return whether predictions put more pairs in order than chance does, and are not far off just now.

    After a change of the traffic the requests that run may all have been predicted alike: their order shows nothing.
    """
    num = min(len(logs), _ORDERED)
    means = found.means(opinions)
    by_mean = _error(np.full(len(logs), found.mean)[-_NOW:], logs[-_NOW:])
    if num < _LEAST_ORDERED or _error(means[-_NOW:], logs[-_NOW:]) > _OFF * by_mean:
        return False
    return in_order > 0.5 + _SURE / sqrt(num)


def _in_order(found: Calibration, opinions: Opinions, logs: Floats) -> float:
    return _share_in_order(log_of(whole(found.means(opinions)))[-_ORDERED:], logs[-_ORDERED:])


def _share_in_order(predicted: Floats, logs: Floats) -> float:
    """Return the share of pairs of unequal outputs that are in order; a pair with equal predictions counts half."""
    longer, said_longer = logs[:, None] > logs, predicted[:, None] > predicted
    num_pairs = int(longer.sum())
    num_right, num_wrong = int((longer & said_longer).sum()), int((longer & said_longer.T).sum())
    return 0.5 + 0.5 * (num_right - num_wrong) / num_pairs if num_pairs else 0.5


def _beyond_by_range(
    predicted: Floats, residuals: Floats, covered: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the edges of the ranges, and for each how far beyond a prediction this share of outputs ends."""
    in_order = np.sort(predicted)
    edges = tuple(float(in_order[len(in_order) * at // _RANGES]) for at in range(1, _RANGES))
    range_of = np.searchsorted(edges, predicted, side="right")
    return edges, tuple(_beyond(residuals[range_of == at], residuals, covered) for at in range(_RANGES))


def _beyond(residuals: Floats, all_residuals: Floats, covered: float) -> float:
    known = np.sort(residuals if len(residuals) >= _LEAST_RESIDUALS else all_residuals)
    return float(known[min(len(known) - 1, int(np.ceil(covered * (len(known) + 1))) - 1)])


def whole(lengths: Floats) -> Ints:
    return np.maximum(1, np.rint(lengths)).astype(np.int64)
