"""The length predictor (ALISE §3.1, Algorithm 1). The router's side process runs it, and the simulator in its place.

    prompt ─▶ its k nearest past prompts with similarity >= s0 ─▶ mean of their outputs, weighted by similarity
                  └── none is so similar ─▶ the network ─▶ mean

A fifth of the prompts is held out of the network's training. They decide which s0 is best, how much longer outputs are
on average than the network's logarithms say, and how far beyond a prediction nine of ten outputs end, which gives the
upper estimate. So the upper estimate holds for any traffic, as long as the traffic stays alike.

Everything here is exact and draws nothing at random: the same commands give the same answers on every machine.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from alignedserve.core import Estimate, Sketch
from alignedserve.machine.whole_file import whole_file
from alignedserve.router.prediction.neighbours import CAPACITY, Floats, Ints, PastPrompts, Similar
from alignedserve.router.prediction.network import Network, length_of, log_of
from alignedserve.scheduling.sketch import DIMENSIONS

log = logging.getLogger("alignedserve.predictor")

Vectors = NDArray[np.int8]

NEAREST = 8
FIRST_SIMILARITY = 0.7  # s0 before the first fit
SIMILARITIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
HELD_OUT = 5  # one of so many prompts is held out of training
COVERED = 0.9  # share of outputs that are no longer than the upper estimate
MOST_TRAINED = 4096  # newest prompts that the network is trained with
FIRST_EPOCHS, LATER_EPOCHS = 16, 4
LEAST_KNOWN = 8  # outputs that must be known before the first prediction
_LOOKED_UP = 32  # held-out prompts that one step of training looks up
_RANGES = 4  # ranges of predictions, each with as many held-out prompts
_LEAST_RESIDUALS = 16  # a range with fewer takes the residuals of all ranges
_FORMAT = 1
_SPREAD = 3.0  # length of the vectors that the network gets


class Encoder(Protocol):
    dimensions: int

    def vectors(self, sketches: Sequence[Sketch]) -> Vectors: ...


class HashEncoder:
    """An encoder that takes a prompt's sketch as its vector."""

    def __init__(self, dimensions: int = DIMENSIONS) -> None:
        self.dimensions = dimensions

    def vectors(self, sketches: Sequence[Sketch]) -> Vectors:
        together = b"".join(sketch.counts for sketch in sketches)
        return np.frombuffer(together, dtype=np.int8).reshape(len(sketches), self.dimensions)


@dataclass(frozen=True)
class _Fitted:
    """The calibration that the held-out prompts have given."""

    least_similarity: float = FIRST_SIMILARITY
    network_mean: float = 1.0  # mean of outputs / mean of the network's answers
    edges: tuple[float, ...] = ()  # logarithms between the ranges of predictions
    beyond: tuple[float, ...] = (1.0,)  # for each range, how far beyond a prediction nine of ten outputs end

    def upper(self, means: Floats) -> Floats:
        logs = log_of(_whole(means))
        return length_of(logs + np.array(self.beyond)[np.searchsorted(self.edges, logs, side="right")])


class LengthModel:
    def __init__(self, encoder: Encoder, capacity: int = CAPACITY) -> None:
        self._encoder = encoder
        self.past = PastPrompts(encoder.dimensions, capacity)
        self._network = Network(encoder.dimensions + 1)
        self._fitted = _Fitted()

    def learn(self, sketches: Sequence[Sketch], num_prompts: Sequence[int], num_outputs: Sequence[int]) -> None:
        for vector, *lengths in zip(self._encoder.vectors(sketches), num_prompts, num_outputs, strict=True):
            self.past.add(vector, *lengths)

    def predict(
        self, sketches: Sequence[Sketch], num_prompts: Sequence[int], least: float | None = None
    ) -> list[Estimate | None]:
        """Return an estimate for each prompt; None while too few outputs are known.

        `least` takes the place of the fitted least similarity.
        """
        if len(self.past) < LEAST_KNOWN:
            return [None] * len(sketches)
        vectors, fitted = self._encoder.vectors(sketches), self._fitted
        least = fitted.least_similarity if least is None else least
        by_past, best = _by_past(self.past, self.past.similar(vectors, NEAREST), least)
        near = best >= least
        means = np.where(near, by_past, self._by_network(vectors, np.array(num_prompts), fitted.network_mean))
        return [_estimate(*estimate) for estimate in zip(means, fitted.upper(means), strict=True)]

    def _by_network(self, vectors: Vectors, num_prompts: Ints, factor: float) -> Floats:
        if self._network.is_new:  # only the mean of all past outputs is known
            means = self.past.means
            return np.full(len(vectors), _whole(means).sum() / len(means))
        return length_of(self._network(self.inputs(vectors, num_prompts))) * factor

    def inputs(self, vectors: NDArray[np.int8] | NDArray[np.float32], num_prompts: Ints) -> Floats:
        """Return the vectors scaled to one length, each with the logarithm of its prompt's length beside it."""
        whole = vectors.astype(np.float64)
        norms = np.sqrt(np.maximum(1.0, (whole * whole).sum(axis=1)))
        return np.column_stack((_SPREAD * whole / norms[:, None], log_of(np.maximum(1, num_prompts)) / 8))

    # --- Training

    def train(self) -> Iterator[None]:
        """Train in small steps, so that predictions need not wait for the end."""
        past = self.past
        newest = past.in_order()[-MOST_TRAINED:]
        held = past.serial[newest] % HELD_OUT == 0
        if held.sum() < 2 or (~held).sum() < 2:
            return
        vectors, inputs = past.vectors[newest], self.inputs(past.vectors[newest], past.num_prompt[newest])
        wanted, actual = log_of(_whole(past.means[newest])), past.last[newest]
        often = past.num_seen[newest[held]]  # a prompt counts as often as it came
        yield
        if self._network.is_new:
            self._network.start_from(float(np.rint(wanted * 1024).sum() / 1024 / len(wanted)))
        for _ in range(FIRST_EPOCHS if self._network.is_new else LATER_EPOCHS):
            yield from self._network.epoch(inputs[~held], wanted[~held])
        said = self._network(inputs[held])
        yield
        vectors = vectors.astype(np.int8)
        without = PastPrompts(self._encoder.dimensions, int((~held).sum()))
        for vector, num_output in zip(vectors[~held], actual[~held].tolist(), strict=True):
            without.add(vector, 1, num_output)
        yield
        similar = yield from _in_steps(without, vectors[held])
        similar = Similar(similar.entries.repeat(often, axis=0), similar.similarity.repeat(often, axis=0))
        self._fitted = self._fit(without, similar, said.repeat(often), actual[held].repeat(often))

    def _fit(self, without: PastPrompts, similar: Similar, said: Floats, actual: Ints) -> _Fitted:
        """Fit thresholds and margins: predict the held-out prompts from the others."""
        logs = log_of(actual)
        by_network = length_of(said)
        network_mean = float(actual.sum() / _whole(by_network).sum())
        by_network = by_network * min(4.0, max(0.25, network_mean))
        fits: list[tuple[float, _Fitted]] = []
        for least in SIMILARITIES:
            by_past, best = _by_past(without, similar, least)
            predicted = log_of(_whole(np.where(best >= least, by_past, by_network)))
            error = float(np.rint(np.abs(logs - predicted) * 1024).sum())
            fits.append((error, _Fitted(least, network_mean, *_beyond_by_range(predicted, logs - predicted))))
        return min(fits, key=lambda fit: fit[0])[1]

    # --- Kept over a restart

    def save(self, path: Path) -> None:
        """Write what was learnt for the next start. Raises OSError."""
        past = self.past
        order = past.in_order()
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            np.savez(  # compressing 50,000 prompts would take a second without predictions
                file,
                format=np.array([_FORMAT, self._encoder.dimensions]),
                vectors=past.vectors[order].astype(np.int8),
                lengths=np.stack([column[order] for column in (past.num_prompt, past.num_seen, past.total, past.last)]),
            )

    def load(self, path: Path) -> None:
        """Read what an earlier process learnt; a file that is broken or of another encoder counts as absent."""
        try:
            with np.load(path, allow_pickle=False) as read:
                shape, vectors, lengths = read["format"], read["vectors"], read["lengths"]
            self._check(shape, vectors, lengths)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, EOFError, BadZipFile, IndexError) as error:
            log.warning("the predictor ignores %s and learns lengths anew: %s", path, error)
            return
        for vector, (num_prompt, num_seen, total, last) in zip(vectors, lengths.T.tolist(), strict=True):
            self.past.restore(vector, num_prompt, num_seen, total, last)

    def _check(self, shape: Ints, vectors: Vectors, lengths: Ints) -> None:
        if shape.tolist() != [_FORMAT, self._encoder.dimensions]:
            raise ValueError("the file is of another version or encoder")
        if vectors.dtype != np.int8 or vectors.shape != (lengths.shape[1], self._encoder.dimensions):
            raise ValueError("the vectors have another shape")
        if lengths.dtype != np.int64 or len(lengths) != 4 or (len(vectors) and lengths.min() < 1):
            raise ValueError("the lengths are not valid")


def _in_steps(past: PastPrompts, asked: Vectors) -> Generator[None, None, Similar]:
    """Look up the prompts most similar to each, a few at a time."""
    found = list[Similar]()
    for start in range(0, len(asked), _LOOKED_UP):
        found.append(past.similar(asked[start : start + _LOOKED_UP], NEAREST))
        yield
    return Similar(
        np.concatenate([part.entries for part in found]), np.concatenate([part.similarity for part in found])
    )


def _by_past(past: PastPrompts, similar: Similar, least: float) -> tuple[Floats, Floats]:
    """Return the mean output of the entries that are similar enough, and the best similarity.

    The weight is the fourth power of the similarity, since a very similar prompt tells more than all others together,
    times the number of outputs that the entry has seen.
    """
    weights, sums = np.zeros(len(similar.entries)), np.zeros(len(similar.entries))
    means, seen = past.means, past.num_seen
    for entries, similarity in zip(similar.entries.T, similar.similarity.T, strict=True):
        counts = (entries >= 0) & (similarity >= least)
        square = np.where(counts, similarity * similarity, 0.0)
        weight = square * square * seen[entries]
        sums, weights = sums + weight * means[entries], weights + weight
    return sums / np.where(weights > 0, weights, 1.0), similar.similarity[:, 0]


def _beyond_by_range(predicted: Floats, residuals: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the edges of the ranges and the margin of each: short answers are predicted more surely than long ones."""
    in_order = np.sort(predicted)
    edges = tuple(float(in_order[len(in_order) * at // _RANGES]) for at in range(1, _RANGES))
    range_of = np.searchsorted(edges, predicted, side="right")
    return edges, tuple(_beyond(residuals[range_of == at], residuals) for at in range(_RANGES))


def _beyond(residuals: Floats, all_residuals: Floats) -> float:
    """Return how far beyond the prediction nine of ten outputs end, by split conformal prediction."""
    known = np.sort(residuals if len(residuals) >= _LEAST_RESIDUALS else all_residuals)
    return max(0.0, float(known[min(len(known) - 1, int(np.ceil(COVERED * (len(known) + 1))) - 1)]))


def _whole(lengths: Floats) -> Ints:
    return np.maximum(1, np.rint(lengths)).astype(np.int64)


def _estimate(mean: float, upper: float) -> Estimate:
    whole = max(1, round(mean))
    return Estimate(whole, max(whole, round(upper)))
