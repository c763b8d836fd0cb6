"""The network: it learns, and its answers do not depend on the order in which a processor adds."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.router.prediction.network import Network, length_of, log_of


@given(st.integers(1, 1 << 20))
def test_logarithms_come_back(length: int) -> None:
    assert length_of(log_of(np.array([length]))).tolist() == [length]


def test_logarithms_grow_by_one_where_lengths_double() -> None:
    assert log_of(np.array([1, 2, 3, 4, 6, 8])).tolist() == [0, 1, 1.5, 2, 2.5, 3]


def _trained(inputs: np.ndarray, wanted: np.ndarray, epochs: int) -> Network:
    network = Network(inputs.shape[1])
    network.start_from(float(np.rint(wanted.mean() * 1024) / 1024))
    for _ in range(epochs):
        for _ in network.epoch(inputs, wanted):
            pass
    return network


def _task(count: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 3, (count, inputs)) / 2
    return x, 6 + 2 * (x[:, 0] - x[:, 1])


def test_it_learns() -> None:
    inputs, wanted = _task(1200, 12)
    network = _trained(inputs[:1000], wanted[:1000], 60)
    error = np.abs(network(inputs[1000:]) - wanted[1000:]).mean()
    assert error < 0.5 * np.abs(wanted - wanted.mean()).mean()


def test_its_sums_are_exact() -> None:
    """Sums by a fast routine equal the sums of fractions."""
    inputs, wanted = _task(256, 12)
    network = _trained(inputs, wanted, 5)
    first, offsets, second, offset = network._parts
    said = network(inputs[:3])
    for row, answer in zip(inputs[:3], said, strict=True):
        hidden = []
        for unit in range(first.shape[1]):
            whole = sum(Fraction(float(x)) * Fraction(float(w)) for x, w in zip(row, first[:, unit], strict=True))
            value = max(Fraction(0), whole + Fraction(float(offsets[unit])))
            hidden.append(Fraction(round(min(value, Fraction(64)) * 1024), 1024))
        exact = sum(h * Fraction(float(w)) for h, w in zip(hidden, second, strict=True)) + Fraction(float(offset[0]))
        assert Fraction(float(answer)) == exact


def test_training_in_another_order_of_sums_gives_the_same_bits() -> None:
    """Rows with another layout in memory are added in another order."""
    inputs, wanted = _task(512, 33)
    by_rows, by_columns = _trained(inputs, wanted, 4), _trained(np.asfortranarray(inputs), wanted, 4)
    assert by_rows(inputs).tobytes() == by_columns(inputs).tobytes()
