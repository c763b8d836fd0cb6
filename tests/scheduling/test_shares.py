"""Tests of the equal parts of callers."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.scheduling.parts import part_of_one
from alignedserve.worker.caller_shares import beyond_parts

ONE = dict.fromkeys(["ann", "bob"], 1)
AMOUNTS = st.dictionaries(st.sampled_from("abcde"), st.lists(st.integers(0, 20), max_size=12), max_size=5)


@pytest.mark.parametrize(
    ("wanted", "capacity", "part"),
    [
        ([], 4, inf),
        ([3, 1], 4, inf),  # there is enough
        ([160, 1], 64, 63),
        ([160, 1, 50], 64, 31.5),
        ([10, 10, 10], 6, 2),
    ],
)
def test_what_a_caller_leaves_is_divided_among_the_others(wanted: list[float], capacity: float, part: float) -> None:
    assert part_of_one([(amount, 1) for amount in wanted], capacity) == part


def test_a_caller_of_more_weight_has_more() -> None:
    amounts = {caller: {f"{caller}-{number}": 1.0 for number in range(160)} for caller in ("ann", "bob")}
    beyond = beyond_parts(amounts, 64, {"ann": 3, "bob": 1})
    assert [name for name in beyond if name.startswith("ann")] == [f"ann-{number}" for number in range(48, 160)]
    assert [name for name in beyond if name.startswith("bob")] == [f"bob-{number}" for number in range(16, 160)]


def test_what_one_of_much_weight_leaves_the_others_have() -> None:
    amounts = {"ann": {"ann-0": 1.0}, "bob": {f"bob-{number}": 1.0 for number in range(160)}}
    assert len(beyond_parts(amounts, 64, {"ann": 100, "bob": 1})) == 160 - 63


def test_a_caller_alone_takes_all() -> None:
    assert beyond_parts({"ann": dict.fromkeys(range(160), 1.0)}, 64, ONE) == {}


def test_the_first_requests_of_a_caller_are_within_its_part() -> None:
    amounts = {"ann": {f"ann-{number}": 1.0 for number in range(160)}, "bob": {"bob-0": 1.0}}
    assert [*beyond_parts(amounts, 64, ONE)] == [f"ann-{number}" for number in range(63, 160)]


def test_what_is_divisible_and_wants_more_than_its_part_lets_others_go_first() -> None:
    amounts = {"ann": {"ann-long": 640.0, "ann-short": 8.0}, "bob": {"bob": 20.0}}
    assert [*beyond_parts(amounts, 64, ONE, are_divisible=True)] == ["ann-long", "ann-short"]


@given(AMOUNTS, st.integers(1, 40), st.fixed_dictionaries({caller: st.integers(1, 4) for caller in "abcde"}))
def test_parts_are_fair_and_nothing_is_left_unused(
    amounts: dict[str, list[int]], capacity: int, weights: dict[str, int]
) -> None:
    named = {caller: {(caller, at): float(size) for at, size in enumerate(sizes)} for caller, sizes in amounts.items()}
    beyond = beyond_parts(named, capacity, weights)
    total = sum(sum(sizes) for sizes in amounts.values())
    if total <= capacity or len(amounts) < 2:
        assert not beyond
        return
    within = {
        caller: [size for request, size in taken.items() if request not in beyond] for caller, taken in named.items()
    }
    one = capacity / sum(weights[caller] for caller in amounts)
    for caller, sizes in within.items():  # each has at least its part, or all that it wants
        assert sum(sizes) >= min(one * weights[caller], sum(amounts[caller])) - 1e-9
    assert sum(map(sum, within.values())) >= capacity - 1e-9  # nothing is held back while there is room
    assert all(sum(sizes[:-1]) < capacity for sizes in within.values())  # and none takes more than there is
