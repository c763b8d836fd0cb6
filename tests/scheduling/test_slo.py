"""The order of service is total, and the time of recent steps is that of a window."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import ServiceClass
from alignedserve.scheduling.slo import Late, Rank, RecentSteps, Standing, StepTimes, in_order

TIMES = StepTimes(mean_s=0.05, most_s=0.1)

short = st.floats(0.001, 5)


class TestRecentSteps:
    @given(st.lists(short, max_size=200))
    def test_the_most_is_that_of_the_window(self, took: list[float]) -> None:
        steps = RecentSteps(StepTimes(0.05, 0.1))
        for seconds in took:
            steps.add(seconds)
        window = [0.1, *took][-RecentSteps.WINDOW :]
        assert steps.now.most_s == max(window)

    def test_the_mean_follows(self) -> None:
        steps = RecentSteps(StepTimes(1.0, 1.0))
        for _ in range(100):
            steps.add(2.0)
        assert steps.now.mean_s == pytest.approx(2.0, rel=1e-4)


standings = st.builds(
    Standing,
    id=st.text("abc", max_size=3),
    service=st.sampled_from(ServiceClass),
    slack_s=st.floats(-10, 10),
    arrival_at=st.integers(0, 3).map(float),
    is_late=st.booleans(),
    priority=st.integers(-1, 1),
    level=st.integers(0, 2),
    restore_s=st.sampled_from([0.0, 0.1]),
    remaining=st.sampled_from([1.0, 10.0]),
)


class TestOrder:
    @given(st.lists(standings, unique_by=lambda standing: standing.id), st.sampled_from(Late), st.randoms())
    def test_it_is_total(self, given_: list[Standing], late: Late, random: Random) -> None:
        """The order is the same whatever the order of its input."""
        shuffled = given_[:]
        random.shuffle(shuffled)
        assert in_order(shuffled, TIMES, late) == in_order(given_, TIMES, late)

    @given(st.lists(standings), st.sampled_from(Late))
    def test_classes_go_before_each_other_and_real_time_is_never_behind_best_effort(
        self, given_: list[Standing], late: Late
    ) -> None:
        ranks = [standing.rank(TIMES, late) for standing in in_order(given_, TIMES, late)]
        assert ranks == sorted(ranks)

    @given(st.lists(standings))
    def test_dropped_last_a_late_request_is_behind_all_that_are_in_time(self, given_: list[Standing]) -> None:
        marks = [standing.is_late for standing in in_order(given_, TIMES, Late.DROP_LAST)]
        assert marks == sorted(marks)

    @given(st.lists(standings))
    def test_with_decay_no_request_goes_before_a_request_of_its_class_with_less_slack(
        self, given_: list[Standing]
    ) -> None:
        """A lower priority, a level or a cache hit may rank requests first, but only among those that can wait."""
        ordered = in_order(given_, TIMES, Late.DECAY)
        for urgent in (Rank.URGENT_RT, Rank.URGENT_BE):
            slacks = [standing.slack_s for standing in ordered if standing.rank(TIMES, Late.DECAY) is urgent]
            assert slacks == sorted(slacks)
        calm = [
            (standing.priority, standing.slack_s) for standing in ordered if standing.rank(TIMES, Late.DECAY) is Rank.RT
        ]
        assert calm == sorted(calm)

    def test_as_a_worked_example(self) -> None:
        rt, be = ServiceClass.RT, ServiceClass.BE
        urgent, soon = Standing("urgent", rt, 0.05, 0.0, priority=9), Standing("soon", rt, 0.5, 0.0)
        behind = Standing("behind", be, -1.0, 0.0)
        favoured, low = Standing("favoured", rt, 5.0, 0.0, priority=-1), Standing("low", be, 50.0, 0.0, level=1)
        high = Standing("high", be, 60.0, 0.0, level=0, remaining=900.0)
        given_ = [low, high, favoured, soon, behind, urgent]
        assert [standing.id for standing in in_order(given_, TIMES)] == [
            "urgent",
            "behind",
            "favoured",
            "soon",
            "high",
            "low",
        ]
