"""Tests of how much of the system each job gets, and how many lines are open at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.jobs.rate import Rate
from alignedserve.jobs.shares import JobDemand, finishes, shares
from alignedserve.jobs.window import FIRST, MOST_PAUSE_S, LineWindow

DEMANDS = st.lists(st.tuples(st.floats(1, 1e5), st.floats(0.01, 100), st.floats(1, 1e7)), min_size=1, max_size=8).map(
    lambda all: [JobDemand(str(number), drawn[0], drawn[0] * 0.9, *drawn[1:]) for number, drawn in enumerate(all)]
)


@given(DEMANDS, st.floats(0.1, 1e6))
def test_all_is_shared_and_where_all_can_be_kept_all_are(demands: list[JobDemand], tokens_per_s: float) -> None:
    share = shares(demands, tokens_per_s, 0.0)
    assert sum(share.values()) == pytest.approx(1)
    assert min(share.values()) >= 0
    through = finishes(demands, tokens_per_s, 0.0)
    if _can_be(demands, tokens_per_s):  # otherwise the policy may give up an early job for several jobs that come later
        assert all(through[demand.job] <= demand.deadline * 1.000001 for demand in demands)


@given(DEMANDS, st.floats(0.1, 1e6))
def test_as_many_are_kept_as_can_be(demands: list[JobDemand], tokens_per_s: float) -> None:
    """No choice of jobs that can all finish in time, one after the other, has more jobs."""
    through = finishes(demands, tokens_per_s, 0.0)
    in_time = sum(through[demand.job] <= demand.deadline * 1.000001 for demand in demands)
    most = max(
        number
        for number in range(len(demands) + 1)
        if any(_can_be(chosen, tokens_per_s) for chosen in combinations(demands, number))
    )
    assert in_time >= most


def _can_be(chosen: Sequence[JobDemand], tokens_per_s: float) -> bool:
    tokens = 0.0
    for demand in sorted(chosen, key=lambda demand: demand.deadline):
        tokens += demand.tokens_left
        if tokens > tokens_per_s * demand.deadline:
            return False
    return True


def test_with_time_for_all_weights_decide() -> None:
    demands = [JobDemand("a", 1e6, 1e6, 1.0, 1.0), JobDemand("b", 1e6, 1e6, 3.0, 1.0)]
    assert shares(demands, 1_000.0, 0.0)["b"] == pytest.approx(0.75, abs=0.01)


def test_while_nobody_knows_how_fast_it_goes_the_nearest_deadline_is_first() -> None:
    demands = [JobDemand("later", 120.0, 108.0, 5.0, 1.0), JobDemand("soon", 60.0, 54.0, 1.0, 1.0)]
    assert shares(demands, None, 0.0) == {"soon": 1.0, "later": 0.0}


def test_a_job_that_cannot_be_kept_costs_no_other_its_deadline() -> None:
    demands = [
        JobDemand("soon", 10.0, 9.0, 1.0, 810.0),
        JobDemand("hopeless", 20.0, 18.0, 100.0, 1e6),
        JobDemand("late", 1e6, 1e6, 1.0, 10.0),
    ]
    share = shares(demands, 100.0, 0.0)
    assert share["soon"] == pytest.approx(0.9)
    assert share["hopeless"] == pytest.approx(0.1, abs=1e-6)
    assert finishes(demands, 100.0, 0.0)["hopeless"] > 20


@pytest.mark.parametrize("deadline", [5.0, 10.0, 19.0])
def test_nor_where_its_deadline_is_nearer_or_the_same(deadline: float) -> None:
    demands = [JobDemand("hopeless", deadline, 0.9 * deadline, 100.0, 1e6), JobDemand("soon", 10.0, 9.0, 1.0, 810.0)]
    through = finishes(demands, 100.0, 0.0)
    assert through["soon"] <= 10.0
    assert through["hopeless"] > deadline


def test_a_callers_batches_leave_anothers_its_part() -> None:
    """Also where their weights and windows would give the one batch next to nothing."""
    flood = [JobDemand(str(number), 600.0, 540.0, 100.0, 1e6, "ann") for number in range(99)]
    share = shares([*flood, JobDemand("bob's", 1e5, 9e4, 1.0, 1e7, "bob")], 100.0, 0.0)
    assert share["bob's"] == pytest.approx(0.5)
    weighty = shares([*flood, JobDemand("bob's", 1e5, 9e4, 1.0, 1e7, "bob", 3)], 100.0, 0.0)
    assert weighty["bob's"] == pytest.approx(0.75)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(1, 1e5), st.floats(1, 1e7)), min_size=1, max_size=8))
def test_no_caller_has_less_than_its_part_or_what_it_needs(drawn: list[tuple[str, float, float]]) -> None:
    weights = {"a": 1, "b": 2, "c": 5}
    demands = [
        JobDemand(str(number), deadline, deadline * 0.9, 1.0, tokens, caller, weights[caller])
        for number, (caller, deadline, tokens) in enumerate(drawn)
    ]
    share, callers = shares(demands, 100.0, 0.0), {caller for caller, _, _ in drawn}
    assert sum(share.values()) == pytest.approx(1)
    for caller in callers:
        own = [demand for demand in demands if demand.caller == caller]
        need = sum(demand.tokens_left / max(1.0, demand.aim) / 100.0 for demand in own)
        part = weights[caller] / sum(weights[other] for other in callers)
        assert sum(share[demand.job] for demand in own) >= min(need, part) - 1e-9


def test_a_rate_is_right_from_its_first_seconds_on_and_follows_a_change() -> None:
    rate = Rate(began_at=100.0)
    assert rate.per_s(101.0) is None
    for second in range(1, 11):
        rate.add(50.0, 100.0 + second)
    assert rate.per_s(110.0) == pytest.approx(50, rel=0.1)
    for second in range(11, 211):
        rate.add(500.0, 100.0 + second)
    assert rate.per_s(310.0) == pytest.approx(500, rel=0.1)


def test_as_many_may_wait_as_run() -> None:
    window = LineWindow(most=100)
    assert window.may_open(FIRST - 1, 0, 0.0)
    assert not window.may_open(FIRST, 0, 0.0)
    assert window.may_open(39, 20, 0.0)
    assert not window.may_open(40, 20, 0.0)
    assert not window.may_open(100, 100, 0.0)


def test_a_refusal_halves_the_window_and_lines_that_end_open_it_again() -> None:
    window = LineWindow(most=100)
    window.refuse(60, retry_after_s=2.0, now=10.0)
    assert not window.may_open(0, 0, 11.9)
    assert window.may_open(29, 29, 12.0)
    assert not window.may_open(30, 29, 12.0)
    window.end()
    assert window.may_open(30, 29, 12.0)


def test_no_wait_that_the_router_estimates_keeps_a_batch_for_long() -> None:
    """Just after an outage it is far too long. Found by `alignedserve fuzz --seed 982029350`."""
    window = LineWindow(most=100)
    window.refuse(60, retry_after_s=31.0, now=10.0)
    assert not window.may_open(0, 0, 10.0 + MOST_PAUSE_S - 0.1)
    assert window.may_open(0, 0, 10.0 + MOST_PAUSE_S)
