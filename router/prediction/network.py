"""A small network from a prompt's vector to the length of its output, for prompts that no past prompt is like.

    x ── W1 ──▶ relu ── w2 ──▶ log of the length

The network learns by Adam, and gives the same answers on every machine: all that it multiplies and sums lies on a grid
of binary fractions, coarse enough that float64 holds each sum exactly, in whatever order it is added. Everything else
is elementwise, by operations that IEEE 754 prescribes to the last bit. Exponentials and logarithms are not among them,
so lengths use a logarithm of their own, which is linear between powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np

from alignedserve.router.prediction.neighbours import Floats, Ints

HIDDEN = 32
BATCH = 128
RATE = 1.0 / 256
DECAY = 1.0 / 256  # of weights at each step, since most words tell nothing
_WEIGHT_BITS, _VALUE_BITS = 12, 10  # binary digits of weights, and of values in the network
_MOST_WEIGHT, _MOST_VALUE, _MOST_ERROR = 8.0, 64.0, 4.0
_KEPT, _KEPT_SQUARES = 1 - 1.0 / 8, 1 - 1.0 / 64  # weights of earlier gradients in the moving means


def log_of(lengths: Ints) -> Floats:
    """Return log2 of the lengths, linear between powers of two: 1 -> 0, 2 -> 1, 3 -> 1.5, 4 -> 2."""
    _, exponents = np.frexp(lengths.astype(np.float64))
    powers = np.ldexp(1.0, exponents - 1)
    return np.asarray(exponents - 1 + (lengths / powers - 1))


def length_of(logs: Floats) -> Floats:
    """Return the lengths that have these logarithms."""
    whole = np.floor(np.clip(logs, 0.0, 30.0))
    return np.asarray(np.ldexp(1.0 + (np.clip(logs, 0.0, 30.0) - whole), whole.astype(np.int64)))


class Network:
    def __init__(self, inputs: int, seed: int = 0) -> None:
        draw = Random(seed)
        scale = 2.0 / inputs**0.5
        first = [[scale * (2 * draw.random() - 1) for _ in range(HIDDEN)] for _ in range(inputs)]
        second = [2 * draw.random() - 1 for _ in range(HIDDEN)]
        # Weights of the first layer, its offsets, weights of the second, and its offset.
        shapes = (np.array(first), np.zeros(HIDDEN), np.array(second) / HIDDEN**0.5, np.zeros(1))
        self._parts = [_on_grid(part, _WEIGHT_BITS, _MOST_WEIGHT) for part in shapes]
        self._exact = [part.copy() for part in shapes]  # the weights before they are rounded to the grid
        self._means = [np.zeros_like(part) for part in shapes]
        self._squares = [np.zeros_like(part) for part in shapes]
        self._kept, self._kept_squares = 1.0, 1.0
        self.is_new = True

    def start_from(self, log: float) -> None:
        """Set what the network answers for every prompt before it has learnt anything."""
        self._exact[3][0] = log
        self._parts[3] = _on_grid(self._exact[3], _WEIGHT_BITS, _MOST_VALUE)

    def __call__(self, inputs: Floats) -> Floats:
        _, said = self._forward(_on_grid(inputs, _VALUE_BITS, _MOST_VALUE))
        return said

    def epoch(self, inputs: Floats, wanted: Floats) -> Iterator[None]:
        """Learn from all inputs once, batch by batch; the caller may do other work between two batches."""
        inputs, self.is_new = _on_grid(inputs, _VALUE_BITS, _MOST_VALUE), False
        num_batches = max(1, len(inputs) // BATCH)
        for number in range(num_batches):
            self._step(inputs[number::num_batches], wanted[number::num_batches])
            yield

    def _forward(self, inputs: Floats) -> tuple[Floats, Floats]:
        first, offsets, second, offset = self._parts
        hidden = _on_grid(np.maximum(0.0, inputs @ first + offsets), _VALUE_BITS, _MOST_VALUE)
        return hidden, hidden @ second + offset

    def _step(self, inputs: Floats, wanted: Floats) -> None:
        hidden, said = self._forward(inputs)
        error = _on_grid(said - wanted, _VALUE_BITS, _MOST_ERROR)  # outliers are clipped
        back = _on_grid(error[:, None] * self._parts[2] * (hidden > 0), _VALUE_BITS, _MOST_VALUE)
        gradients = [inputs.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(keepdims=True)]
        self._kept, self._kept_squares = self._kept * _KEPT, self._kept_squares * _KEPT_SQUARES
        for at, gradient in enumerate(gradients):
            mean = gradient / len(inputs)
            self._means[at] = _KEPT * self._means[at] + (1 - _KEPT) * mean
            self._squares[at] = _KEPT_SQUARES * self._squares[at] + (1 - _KEPT_SQUARES) * (mean * mean)
            push = self._means[at] / (1 - self._kept)
            size = np.sqrt(self._squares[at] / (1 - self._kept_squares)) + 1e-8
            self._exact[at] -= RATE * (push / size)
            if at in (0, 2):
                self._exact[at] -= DECAY * self._exact[at]
            most = _MOST_VALUE if at == 3 else _MOST_WEIGHT
            self._parts[at] = _on_grid(self._exact[at], _WEIGHT_BITS, most)


def _on_grid(values: Floats, bits: int, most: float) -> Floats:
    scale = float(1 << bits)
    return np.asarray(np.rint(np.clip(values, -most, most) * scale) / scale)
