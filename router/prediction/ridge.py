"""Ridge regression from a prompt's vector to the logarithm of its output's length.

    weights = (X'X + penalty)⁻¹ X'y

It gives the same answers on every machine. Inputs, logarithms and weights lie on grids of binary fractions, coarse
enough that float64 holds each sum of their products exactly, in whatever order it is added. A fast routine solves the
equations nearly; where a weight is so near the middle between two places of the grid that this could decide, they are
solved element by element, by operations that IEEE 754 prescribes to the last bit. Exponentials and logarithms are not
among them, so lengths use a logarithm of their own, which is linear between powers of two.
"""

from __future__ import annotations

import numpy as np

from alignedserve.router.prediction.neighbours import Floats, Ints

PENALTY = 10.0
_INPUT_BITS, _WEIGHT_BITS = 10, 16  # binary digits behind the point
_MOST_INPUT, _MOST_WEIGHT = 16.0, 64.0


def log_of(lengths: Ints) -> Floats:
    """Return log2 of the lengths, linear between powers of two: 1 -> 0, 2 -> 1, 3 -> 1.5, 4 -> 2."""
    _, exponents = np.frexp(lengths.astype(np.float64))
    powers = np.ldexp(1.0, exponents - 1)
    return np.asarray(exponents - 1 + (lengths / powers - 1))


def length_of(logs: Floats) -> Floats:
    """Return the lengths that have these logarithms."""
    whole = np.floor(np.clip(logs, 0.0, 30.0))
    return np.asarray(np.ldexp(1.0 + (np.clip(logs, 0.0, 30.0) - whole), whole.astype(np.int64)))


class Ridge:
    def __init__(self, num_inputs: int) -> None:
        self._weights = np.zeros(num_inputs + 1)  # the last one is of a constant input of 1
        self.forget()

    def lengths(self, inputs: Floats) -> Floats:
        return length_of(_rows(inputs) @ self._weights)

    def forget(self) -> None:
        """Forget all examples; the weights stay until the next fit."""
        self._products, self._right = np.zeros((len(self._weights),) * 2), np.zeros(len(self._weights))

    def count(self, inputs: Floats, lengths: Ints, often: Ints) -> None:
        """Count examples: inputs, the lengths of their outputs, and how often each is added, or taken out if less than
        0 times."""
        rows = _rows(inputs)
        counted = rows.T * often
        self._products += counted @ rows
        self._right += counted @ _on_grid(log_of(lengths), _INPUT_BITS, _MOST_WEIGHT)

    def fit(self) -> None:
        """Fit the weights to the examples that are counted."""
        matrix = self._products.copy()
        matrix[np.diag_indices(len(matrix) - 1)] += PENALTY  # the constant has none
        self._weights = _on_grid(_solved_for_grid(matrix, self._right), _WEIGHT_BITS, _MOST_WEIGHT)


def _solved_for_grid(matrix: Floats, right: Floats) -> Floats:
    """Return x of matrix · x = right, near enough that it rounds to the same place of the grid on every machine."""
    quick = np.asarray(np.linalg.solve(matrix, right), np.float64)
    steps = quick * (1 << _WEIGHT_BITS)
    from_middle = np.abs(steps - np.floor(steps) - 0.5)
    return solved(matrix, right) if from_middle.min() < _doubt(matrix, steps) else quick


def _doubt(matrix: Floats, solution: Floats) -> float:
    """Return more than a fast routine's error: the least eigenvalue is about 1, as inputs are not longer than 4."""
    return float(4 * np.finfo(np.float64).eps * matrix.trace() * np.abs(solution).max())


def solved(matrix: Floats, right: Floats) -> Floats:
    """Solve matrix · x = right by Gaussian elimination; a positive definite matrix needs no other pivots."""
    left: Floats = matrix.copy()
    x: Floats = right.copy()
    for at in range(len(x)):
        below = left[at + 1 :, at] / left[at, at]
        left[at + 1 :, at + 1 :] -= below[:, None] * left[at, at + 1 :]
        x[at + 1 :] -= below * x[at]
    for at in reversed(range(len(x))):
        x[at] /= left[at, at]
        x[:at] -= left[:at, at] * x[at]
    return x


def _rows(inputs: Floats) -> Floats:
    return np.column_stack((_on_grid(inputs, _INPUT_BITS, _MOST_INPUT), np.ones(len(inputs))))


def _on_grid(values: Floats, bits: int, most: float) -> Floats:
    scale = float(1 << bits)
    return np.asarray(np.rint(np.clip(values, -most, most) * scale) / scale)
