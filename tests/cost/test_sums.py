"""Sums that are the same under every version of Python."""

from __future__ import annotations

from alignedserve.cost.sums import added


def test_nothing_that_rounding_loses_is_carried_along() -> None:
    assert added([0.1] * 10) == 0.9999999999999999  # `sum` returns 1.0 since Python 3.12
    assert added([1e16, 1.0, -1e16]) == 0.0


def test_nothing_is_zero() -> None:
    assert added([]) == 0.0
