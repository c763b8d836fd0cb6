"""Charts have round numbers at their axes."""

from __future__ import annotations

import re

import pytest

from alignedserve.lab.bench.page import Chart, Curve


@pytest.mark.parametrize(
    ("xs", "is_logarithmic", "ticks"),
    [
        ((1, 100), True, "1 2 5 10 20 50 100"),
        ((10, 1000), True, "10 20 50 100 200 500 1000"),
        ((1, 10_000), True, "1 10 100 1000 10000"),
        ((0, 5), False, "0 1 2 3 4 5"),
        ((0, 0.3), False, "0 0.05 0.1 0.15 0.2 0.25 0.3"),
    ],
)
def test_both_ends_of_an_axis_have_a_number_where_they_are_round(
    xs: tuple[float, ...], is_logarithmic: bool, ticks: str
) -> None:
    curve = Curve("ours", "#000", False, tuple((x, 1.0) for x in xs))
    drawn = Chart("a title", "x", "y", (curve,), is_logarithmic=is_logarithmic).svg()
    found = re.findall(r'<text x="([^"]+)"[^>]* text-anchor="middle">([^<]+)<', drawn)
    assert [text for _, text in found] == ticks.split()
    left, right = re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)"', drawn)[0]
    assert (found[0][0], found[-1][0]) == (left, right), "they stand at the ends"
