"""The regression: it learns, and its answers do not depend on the order in which a processor adds."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.router.prediction.ridge import Ridge, length_of, log_of, solved

Array = np.ndarray


@given(st.integers(1, 1 << 20))
def test_logarithms_come_back(length: int) -> None:
    assert length_of(log_of(np.array([length]))).tolist() == [length]


def test_logarithms_grow_by_one_where_lengths_double() -> None:
    assert log_of(np.array([1, 2, 3, 4, 6, 8])).tolist() == [0, 1, 1.5, 2, 2.5, 3]


def _task(count: int, num_inputs: int) -> tuple[Array, Array]:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 3, (count, num_inputs)) / 2
    return x, np.rint(length_of(6 + 2 * (x[:, 0] - x[:, 1]))).astype(np.int64)


def _fitted(inputs: Array, lengths: Array, often: int = 1) -> Ridge:
    ridge = Ridge(inputs.shape[1])
    ridge.count(inputs, lengths, np.full(len(lengths), often))
    ridge.fit()
    return ridge


def test_it_learns() -> None:
    inputs, lengths = _task(1200, 12)
    said = _fitted(inputs[:1000], lengths[:1000]).lengths(inputs[1000:])
    error = np.abs(log_of(lengths[1000:]) - np.log2(said)).mean()
    assert error < 0.3 * np.abs(log_of(lengths[1000:]) - log_of(lengths).mean()).mean()


def test_before_a_fit_it_says_one_token() -> None:
    assert Ridge(3).lengths(np.ones((2, 3))).tolist() == [1, 1]


def test_without_inputs_that_tell_anything_it_says_the_mean_of_the_logarithms() -> None:
    inputs = np.zeros((4, 3))
    assert _fitted(inputs, np.array([32, 32, 128, 128])).lengths(inputs).tolist() == 4 * [64]


def test_the_solution_solves_the_equations() -> None:
    draw = np.random.default_rng(1)
    x = draw.integers(-8, 9, (60, 20)).astype(np.float64)
    matrix, right = x.T @ x + np.eye(20), draw.integers(-99, 99, 20).astype(np.float64)
    assert np.allclose(matrix @ solved(matrix, right), right)


def test_its_sums_are_exact() -> None:
    """Sums by a fast routine equal the sums of fractions."""
    inputs, lengths = _task(256, 12)
    ridge = _fitted(inputs, lengths)
    for row, said in zip(inputs[:3], ridge.lengths(inputs[:3]), strict=True):
        values = [Fraction(round(1024 * x), 1024) for x in row] + [Fraction(1)]
        exact = sum(x * Fraction(float(w)) for x, w in zip(values, ridge._weights, strict=True))
        assert said == length_of(np.array([float(exact)]))[0]


@pytest.mark.parametrize("off", [-4e-15, 4e-15])
def test_a_routine_that_rounds_otherwise_gives_the_same_bits(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of these logarithms, 10 + 1 / 2**17, is in the middle between two places of the grid."""
    between = np.zeros((128, 1)), np.array([1025] + 127 * [1024])
    here = [_fitted(*task)._weights.tobytes() for task in (between, _task(256, 12))]
    solve = np.linalg.solve
    monkeypatch.setattr(np.linalg, "solve", lambda matrix, right: solve(matrix, right) * (1 + off))
    there = [_fitted(*task)._weights.tobytes() for task in (between, _task(256, 12))]
    assert here == there


def test_a_fit_in_another_order_of_sums_gives_the_same_bits() -> None:
    """Rows with another layout in memory, or in pieces, are added in another order."""
    inputs, lengths = _task(512, 33)
    often = np.arange(512) % 16 + 1
    whole, pieces = Ridge(33), Ridge(33)
    whole.count(np.asfortranarray(inputs), lengths, often)
    for at in range(0, 512, 100):
        pieces.count(inputs[at : at + 100], lengths[at : at + 100], often[at : at + 100])
    whole.fit()
    pieces.fit()
    assert whole._weights.tobytes() == pieces._weights.tobytes()


def test_examples_that_are_taken_out_leave_no_trace() -> None:
    inputs, lengths = _task(512, 12)
    often = np.arange(512) % 16 + 1
    ridge = Ridge(12)
    ridge.count(inputs, lengths, often)
    ridge.fit()
    ridge.count(inputs[256:], lengths[256:], -often[256:])
    ridge.count(inputs[:256], lengths[:256], 1 - often[:256])
    ridge.fit()
    assert ridge._weights.tobytes() == _fitted(inputs[:256], lengths[:256])._weights.tobytes()
