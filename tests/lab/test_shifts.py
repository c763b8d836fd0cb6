"""What counts as a figure that got worse: lab/benchmarks/common/shifts.py."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.lab.benchmarks.common.columns import Columns
from alignedserve.lab.benchmarks.common.shifts import (
    LIMITS,
    Shift,
    better,
    drawn,
    shifts,
    together,
    verdict,
    words,
    worse,
)

STEADY: Columns = {
    "attained": 90.0,
    "documents": 200.0,
    "latency_ms": 50.0,
    "first_p95_ms": 300.0,
    "gap_p99_ms": 100.0,
}
values = st.floats(min_value=0.1, max_value=1e4)


def of_seeds(columns: Columns, *each: Columns) -> dict[int, Columns]:
    return dict(enumerate({**columns, **one} for one in each))


def moved(column: str, before: list[float], now: list[float]) -> list[str]:
    """Return the columns that are red where one of them has these values."""
    then = of_seeds(STEADY, *({column: value} for value in before))
    return list(worse(shifts(then, of_seeds(STEADY, *({column: value} for value in now)))))


@pytest.mark.parametrize(
    ("column", "allowed", "beyond"),
    [
        ("attained", 89.1, 88.9),  # a point
        ("documents", 194.1, 193.9),  # 3 %
        ("latency_ms", 52.4, 52.6),  # 5 %
        ("first_p95_ms", 314.9, 315.1),
        ("gap_p99_ms", 104.9, 105.1),
    ],
)
def test_each_column_has_its_limit(column: str, allowed: float, beyond: float) -> None:
    before = 3 * [STEADY[column] or 0.0]
    assert moved(column, before, 3 * [allowed]) == []
    assert moved(column, before, 3 * [beyond]) == [column]


def test_seeds_that_disagree_are_not_red() -> None:
    assert moved("attained", [61.0, 70.2, 66.1], [66.0, 53.9, 68.0]) == []
    assert moved("attained", [54.9, 51.0, 55.1], [47.1, 42.3, 43.5]) == ["attained"]


def test_all_loads_of_a_kind_together_say_what_one_does_not() -> None:
    one = shifts(of_seeds(STEADY, {}, {}, {}), of_seeds({**STEADY, "attained": 90.0}, {}, {"attained": 84.0}, {}))
    assert not worse(one)
    assert list(worse(together([one] * 12))) == ["attained"]


def test_what_is_gone_is_red_and_what_is_new_is_not() -> None:
    none = {**STEADY, "latency_ms": None}
    assert list(worse(shifts(of_seeds(STEADY, {}, {}), of_seeds(none, {}, {})))) == ["latency_ms"]
    assert not worse(shifts(of_seeds(none, {}, {}), of_seeds(STEADY, {}, {})))
    assert shifts({}, of_seeds(STEADY, {})) == {}
    assert shifts(of_seeds(STEADY, {}), {7: STEADY}) == {}  # seeds that were not committed


def test_documents_that_were_none_only_get_better() -> None:
    found = shifts(of_seeds({**STEADY, "documents": 0.0}, {}, {}), of_seeds(STEADY, {}, {}))
    assert found["documents"] == [inf, inf]
    assert list(better(found)) == ["documents"]


def test_words_say_the_shift_with_its_error_and_unit() -> None:
    assert words({"latency_ms": Shift.from_values([-20.0, -21.0, -22.0])}) == "latency_ms -21 ± 0.58 %"


@given(st.dictionaries(st.sampled_from([*LIMITS]), st.lists(values, min_size=3, max_size=3)))
def test_the_same_values_never_move(by_column: dict[str, list[float]]) -> None:
    seeds = {seed: {column: each[seed] for column, each in by_column.items()} for seed in range(3)}
    found = shifts(seeds, seeds)
    assert not worse(found)
    assert not better(found)


@given(st.sampled_from([*LIMITS]), st.lists(st.tuples(values, values), min_size=3, max_size=8))
def test_red_one_way_is_never_red_the_other_way(column: str, pairs: list[tuple[float, float]]) -> None:
    before, now = ({seed: {column: pair[at]} for seed, pair in enumerate(pairs)} for at in (0, 1))
    found = shifts(before, now)
    assert not (worse(found) and better(found))
    if LIMITS[column].unit == "points":
        assert bool(worse(found)) == bool(better(shifts(now, before)))


costs = st.dictionaries(st.text(max_size=5), st.integers(0, 60), max_size=30)


@given(costs, st.text(), st.integers(0, 90))
def test_a_draw_follows_from_the_base_and_the_names_alone(costs: dict[str, float], base: str, most_s: int) -> None:
    chosen = drawn(costs, base, most_s)
    assert sum(costs[load] for load in chosen) <= most_s
    assert drawn(dict(reversed(costs.items())), base, most_s) == chosen
    left_out = costs.keys() - {*chosen}
    assert all(costs[load] > most_s - sum(costs[each] for each in chosen) for load in left_out)


def test_another_base_draws_others() -> None:
    costs = dict.fromkeys(map(str, range(100)), 1.0)
    assert drawn(costs, "a", 10) != drawn(costs, "b", 10)


def brought(by_load: dict[str, list[float]], column: str = "attained") -> str:
    """Return the verdict on a rule that brings this to each load, whose kind is its first word."""
    return verdict({load: {column: values} for load, values in by_load.items()}, lambda load: load.split()[0])


def test_a_rule_is_worth_its_mean_over_a_kind_of_loads() -> None:
    assert brought({"tight 1": [13.0, 14.0], "tight 2": [14.0, 15.0], "alone 1": [0.0, 0.0]}) == (
        "worth attained +14 ± 0.41 points over all tight (2 loads)"
    )
    assert "costs attained +2 ± 0 points over all alone" in brought({"tight 1": [13.0, 14.0], "alone 1": [-2.0, -2.0]})
    assert brought({"tight 1": [-2.0, -2.5]}).startswith("not worth it: costs attained +2.25 ± 0.25 points")


def test_a_best_load_is_named_and_is_no_worth_of_the_kind() -> None:
    others = {f"alone {at}": [0.1, -0.1] for at in range(20)}
    assert brought({**others, "alone best": [2.0, 2.2]}) == (
        "no worth over any kind; for these loads alone attained +2.1 ± 0.1 points over alone best; "
        "costs no kind anything"
    )
    assert brought({**others, "alone wide": [9.0, -3.0]}) == "no worth in 21 loads"
    assert brought({load: [0.3, 0.4] for load in others}) == "no worth in 20 loads"


def test_latency_counts_as_worth() -> None:
    assert brought({"tight 1": [8.0, 9.0]}, "latency_ms").startswith("worth latency_ms")
