"""Tests of the slopes that benchmarks.endurance reports: what grows is told from noise and from another level."""

from __future__ import annotations

from random import Random

import pytest

from alignedserve.lab.benchmarks.endurance import slope, slopes, table


def noisy(level: float, growth: float, seed: int, count: int = 60) -> list[tuple[float, float]]:
    draw = Random(seed)
    return [(at / 60, level + growth * at / 60 + draw.gauss(0, 1)) for at in range(count)]


def test_growth_is_found_under_noise_and_a_level_that_stays_is_none() -> None:
    grown, flat = slope([noisy(100, 6, seed=1)]), slope([noisy(100, 0, seed=2)])
    assert grown.slope == pytest.approx(6, abs=3 * grown.error)
    assert grown.grows(least=1.0)
    assert not flat.grows(least=1.0)


def test_a_level_of_its_own_for_each_part_is_no_growth() -> None:
    parts = [noisy(100, 0, seed=3), noisy(150, 0, seed=4)]
    assert not slope(parts).grows(least=1.0)
    assert slope(parts).mean == pytest.approx(125, abs=1)


def test_the_error_covers_the_slope_as_often_as_it_says() -> None:
    """Also where every value is like the one before."""

    def wandering(seed: int) -> list[tuple[float, float]]:
        draw, rest, found = Random(seed), 0.0, []
        for at in range(200):
            rest = 0.7 * rest + draw.gauss(0, 1)
            found.append((at / 100, 50 + rest))
        return found

    fitted = [slope([wandering(seed)]) for seed in range(300)]
    assert sum(abs(each.slope) < 2 * each.error for each in fitted) > 0.9 * len(fitted)


def test_too_few_values_show_no_growth() -> None:
    assert not slope([]).grows(0.0)
    assert not slope([[(0.0, 1.0), (1.0, 9.0)]]).grows(0.0)


def sample(part: int, at_s: float, errors: tuple[str, ...] = (), **figures: float) -> dict[str, object]:
    return {"part": part, "at_s": at_s, "figures": figures, "done": {"chat": 3}, "errors": list(errors)}


def test_the_table_leaves_the_warm_up_of_each_part_out() -> None:
    grows = [sample(part, at, descriptors=min(10 * at, 300.0)) for part in (1, 2) for at in range(0, 1_200, 30)]
    assert slopes(grows, warm_up_s=40)["descriptors"].slope == 0
    shown, is_well = table(grows, warm_up_s=40)
    assert is_well
    assert "40 minutes in 2 parts; 240 chat; 0 errors" in shown
    leaks = [sample(1, at, descriptors=20 + at / 100) for at in range(0, 1_200, 30)]
    assert table(leaks, warm_up_s=40)[1] is False


def test_the_table_does_not_call_flat_what_it_cannot_tell() -> None:
    few = [sample(1, at, descriptors=20) for at in (30, 60)]
    assert "too few values to tell" in table(few, warm_up_s=0)[0]
    assert "the first 300 s of each part do not count" in table(few, warm_up_s=300)[0]


def test_an_error_is_not_well() -> None:
    assert table([sample(1, 30, ("chat: 500",), threads=4)], warm_up_s=0)[1] is False
