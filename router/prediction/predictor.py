"""The length predictor (ALISE §3.1, Algorithm 1). The router's side process runs it, and the simulator in its place.

    prompt ─▶ the k nearest past prompts with similarity >= s0 ─▶ mean of their outputs, weighted by similarity
                  └── none is that similar ─▶ ridge regression ─▶ mean

The regression takes the place of ALISE's network: it was closer on nearly every text (docs/how/router.md), and has
a closed form. calibration.py corrects both by what came of recent prompts, and withdraws them where they tell nothing.

Everything here is exact and draws nothing at random: the same commands give the same answers on every machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from alignedserve.core import Estimate, Sketch
from alignedserve.machine.whole_file import whole_file
from alignedserve.router.prediction.calibration import WINDOW, Calibration, Opinions, RecentOutputs, whole
from alignedserve.router.prediction.neighbours import CAPACITY, Floats, Ints, PastPrompts
from alignedserve.router.prediction.ridge import Ridge, log_of
from alignedserve.scheduling.sketch import DIMENSIONS

log = logging.getLogger("alignedserve.predictor")

Vectors = NDArray[np.int8]

NEAREST = 8
MOST_FITTED = 8192  # newest prompts that the regression is fitted to
LEAST_KNOWN = 8  # prompts that must be known for a fit
_CALIBRATED_EVERY = 8  # outputs
_TOGETHER = 64  # kept prompts that are learnt at a time
_FORMAT = 1
_SPREAD = 3.0  # length of the vectors that the regression gets


class HashEncoder:
    """An encoder that takes a prompt's sketch as the vector."""

    def __init__(self, dimensions: int = DIMENSIONS) -> None:
        self.dimensions = dimensions

    def vectors(self, sketches: Sequence[Sketch]) -> Vectors:
        together = b"".join(sketch.counts for sketch in sketches)
        return np.frombuffer(together, dtype=np.int8).reshape(len(sketches), self.dimensions)


class LengthModel:
    def __init__(self, encoder: HashEncoder, capacity: int = CAPACITY) -> None:
        self._encoder = encoder
        self.past = PastPrompts(encoder.dimensions, capacity)
        self._ridge = Ridge(encoder.dimensions + 1)
        self._newest = NewestPrompts(self.past, self._ridge, self._inputs_of)
        self._recent = RecentOutputs(NEAREST)
        self._num_learnt = 0
        self.calibration: Calibration | None = None  # None before the first fit

    def learn(self, sketches: Sequence[Sketch], num_prompts: Sequence[int], num_outputs: Sequence[int]) -> None:
        """Compare outputs with what would have been predicted, then add them to the past."""
        self._learn(self._encoder.vectors(sketches), np.array(num_prompts), np.array(num_outputs))

    def predict(self, sketches: Sequence[Sketch], num_prompts: Sequence[int]) -> list[Estimate | None]:
        """Return an estimate for each prompt; None before the first fit."""
        if self.calibration is None:
            return [None] * len(sketches)
        opinions = self.opinions(self._encoder.vectors(sketches), np.array(num_prompts))
        means = self.calibration.means(opinions)
        return [_estimate(*estimate) for estimate in zip(means, self.calibration.uppers(means), strict=True)]

    def opinions(self, vectors: Vectors, num_prompts: Ints) -> Opinions:
        entries, similarity = self.past.similar(vectors, NEAREST)
        by_ridge = self._ridge.lengths(self.inputs(vectors, num_prompts))
        return Opinions(similarity, _by_past(self.past, entries, similarity), by_ridge)

    def inputs(self, vectors: NDArray[np.int8] | NDArray[np.float32], num_prompts: Ints) -> Floats:
        """Return the vectors scaled to one length, each with the logarithm of the prompt's length."""
        exact = vectors.astype(np.float64)
        norms = np.sqrt(np.maximum(1.0, (exact * exact).sum(axis=1)))
        return np.column_stack((_SPREAD * exact / norms[:, None], log_of(np.maximum(1, num_prompts)) / 8))

    def fit(self) -> None:
        """Fit the regression to the newest prompts."""
        newest = self.past.in_order()[-MOST_FITTED:]
        if len(newest) < LEAST_KNOWN:
            return
        self._newest.fit(newest)
        means, often = self.past.means[newest], self.past.num_seen[newest]
        self._calibrate(self._recent.mean or float((whole(means) * often).sum() / often.sum()))

    def _inputs_of(self, entries: Ints) -> Floats:
        return self.inputs(self.past.vectors[entries], self.past.num_prompt[entries])

    def _learn(self, vectors: Vectors, num_prompts: Ints, num_outputs: Ints) -> None:
        self._compare(vectors, num_prompts, num_outputs)
        for vector, *lengths in zip(vectors, map(int, num_prompts), map(int, num_outputs), strict=True):
            self.past.add(vector, *lengths)
            self._num_learnt += 1
            if self.calibration is not None and self._num_learnt % _CALIBRATED_EVERY == 0:
                self._calibrate(self.calibration.mean)

    def _compare(self, vectors: Vectors, num_prompts: Ints, num_outputs: Ints) -> None:
        """Note what would have been said of these prompts, and what came."""
        if self.calibration is not None:
            opinions = self.opinions(vectors, num_prompts)
            self._recent.add(opinions, self.calibration.uppers(self.calibration.means(opinions)), num_outputs)

    def _calibrate(self, mean: float) -> None:
        before, self.calibration = self.calibration, self._recent.calibrated(mean)
        if before is not None and before.is_useful != self.calibration.is_useful:
            log.info(_said_of(self.calibration))

    # --- Kept over a restart

    def save(self, path: Path) -> None:
        """Write what was learnt for the next start. Raises OSError."""
        past = self.past
        order = past.in_order()
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, is_private=True) as file:  # sketches of what people asked
            np.savez(  # compressing 50,000 prompts would take a second without predictions
                file,
                format=np.array([_FORMAT, self._encoder.dimensions]),
                vectors=past.vectors[order].astype(np.int8),
                lengths=np.stack([column[order] for column in (past.num_prompt, past.num_seen, past.total, past.last)]),
            )

    def load(self, path: Path) -> None:
        """Read what an earlier process learnt; a file that is broken or of another encoder counts as absent.

        The newest outputs are learnt again, each after what came before it, so that they calibrate the predictions.
        """
        try:
            with np.load(path, allow_pickle=False) as read:
                shape, vectors, lengths = read["format"], read["vectors"], read["lengths"]
            self._check(shape, vectors, lengths)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, EOFError, BadZipFile, IndexError) as error:
            log.warning("the predictor ignores %s and learns lengths again: %s", path, error)
            return
        newest_at = num_older(len(vectors))
        self._restore(vectors[:newest_at], lengths[:, :newest_at])
        self.fit()
        for at in range(newest_at, len(vectors), _TOGETHER):
            some, of_some = vectors[at : at + _TOGETHER], lengths[:, at : at + _TOGETHER]
            self._compare(some, of_some[0], of_some[3])
            self._restore(some, of_some)
        self.fit()

    def _restore(self, vectors: Vectors, lengths: Ints) -> None:
        for vector, (num_prompt, num_seen, total, last) in zip(vectors, lengths.T.tolist(), strict=True):
            self.past.restore(vector, num_prompt, num_seen, total, last)

    def _check(self, shape: Ints, vectors: Vectors, lengths: Ints) -> None:
        if shape.tolist() != [_FORMAT, self._encoder.dimensions]:
            raise ValueError("the file is of another version or encoder")
        if vectors.dtype != np.int8 or vectors.shape != (lengths.shape[1], self._encoder.dimensions):
            raise ValueError("the vectors have another shape")
        if lengths.dtype != np.int64 or len(lengths) != 4 or (len(vectors) and lengths.min() < 1):
            raise ValueError("the lengths are not valid")


def num_older(num_kept: int) -> int:
    """Return how many kept outputs are learnt before the first fit; the newer ones show how good it is."""
    return max(num_kept // 2, num_kept - WINDOW)


def _by_past(past: PastPrompts, entries: Ints, similarity: Floats) -> Floats:
    """Return the mean output of the nearest entry, of the two nearest, and so on.

    The weight is the fourth power of the similarity, since a very similar prompt tells more than all others together,
    times the number of the entry's outputs.
    """
    square = similarity * similarity
    weights = np.where(entries >= 0, square * square * past.num_seen[entries], 0.0)
    means = past.means_of(np.maximum(0, entries)) if len(past) else np.zeros(weights.shape)
    sums = np.cumsum(weights, axis=1)
    return np.asarray(np.cumsum(weights * means, axis=1) / np.where(sums > 0, sums, 1.0))


def _said_of(found: Calibration) -> str:
    use = "lengths are predicted" if found.is_useful else "all outputs are predicted alike"
    return (
        f"{use}: of recent outputs {found.in_order:.0%} of pairs are in order, {found.covered:.0%} within their bounds"
    )


def _estimate(mean: float, upper: float) -> Estimate:
    most = max(1, round(upper))
    return Estimate(min(most, max(1, round(mean))), most)


_AT_ONCE = 1024  # prompts that are summed at a time


@dataclass
class _CountedOutputs:
    """What the sums have of each entry: how often it counts, and with which output."""

    serials: Ints  # of the entries that were in these rows
    often: Ints  # 0: the sums have nothing of it
    lengths: Ints

    @classmethod
    def nothing(cls, num: int) -> _CountedOutputs:
        return cls(np.zeros(num, np.int64), np.zeros(num, np.int64), np.ones(num, np.int64))

    def longer(self, num: int) -> _CountedOutputs:
        """Return the same with room for `num` entries."""
        new = self.nothing(num - len(self.often))
        columns = (self.serials, new.serials), (self.often, new.often), (self.lengths, new.lengths)
        return _CountedOutputs(*map(np.concatenate, columns))


class NewestPrompts:
    """The regression's fit to the newest past prompts: a fit counts only what has changed since the last one.

    Sums of the regression are exact (ridge.py). So what is taken out leaves no trace, and the sums equal those of a
    fit that counts all newest prompts again.
    """

    def __init__(self, past: PastPrompts, ridge: Ridge, inputs: Callable[[Ints], Floats]) -> None:
        self._past, self._ridge, self._inputs = past, ridge, inputs
        self._counted = _CountedOutputs.nothing(0)

    def fit(self, newest: Ints) -> None:
        """Fit the regression to these entries."""
        before, now = self._before(), self._now(newest)
        changed = (before.often != now.often) | (before.lengths != now.lengths)
        self._count(np.flatnonzero(changed & (before.often > 0)), before, -1)
        self._count(np.flatnonzero(changed & (now.often > 0)), now, 1)
        self._counted = now
        self._ridge.fit()

    def _before(self) -> _CountedOutputs:
        """Return what the sums have. They begin again where an entry that they count has made room for another."""
        counted = self._counted.longer(len(self._past))
        gone = (counted.serials != self._past.serial[: len(self._past)]) & (counted.often > 0)
        if not gone.any():
            return counted
        self._ridge.forget()
        return _CountedOutputs.nothing(len(self._past))

    def _now(self, newest: Ints) -> _CountedOutputs:
        past, now = self._past, _CountedOutputs.nothing(len(self._past))
        now.serials[newest], now.often[newest] = past.serial[newest], past.num_seen[newest]
        now.lengths[newest] = whole(past.means[newest])
        return now

    def _count(self, rows: Ints, counted: _CountedOutputs, sign: int) -> None:
        for at in range(0, len(rows), _AT_ONCE):
            some = rows[at : at + _AT_ONCE]
            self._ridge.count(self._inputs(some), counted.lengths[some], sign * counted.often[some])
