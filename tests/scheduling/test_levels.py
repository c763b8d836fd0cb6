"""Levels by remaining or served tokens: a request falls when it outlives its prediction, and rises when it waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import ServiceClass
from alignedserve.papers.fastserve import level_served
from alignedserve.papers.names import SchedulerName
from alignedserve.scheduling.dues import Promise, promise
from alignedserve.scheduling.levels import LEVELS, STEP_PROMPT, TOP, Level, level_of
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import StepTimes, Work
from tests.samples import request

BE = replace(request(prompt=10, max_tokens=1000), service=ServiceClass.BE, arrival_at=100.0)
times = st.floats(0.0, 1000.0)


def test_bounds_double_from_32_steps() -> None:
    assert [level_of(steps) for steps in (1, 32, 33, 64, 65, 128, 129, 256, 257, 10_000)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    ]


def test_a_served_request_moves_on_where_the_bounds_above_are_used_up() -> None:
    assert [level_served(tokens) for tokens in (0, 31, 32, 95, 96, 223, 224, 479, 480, 10_000)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    ]


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_levels_are_monotone(left: int, right: int) -> None:
    low, high = sorted((left, right))
    assert 0 <= level_of(low) <= level_of(high) < LEVELS
    assert 0 <= level_served(low) <= level_served(high) < LEVELS


@given(times, st.floats(0.01, 100.0), st.integers(0, 600), st.integers(0, 6), st.lists(times, max_size=6))
def test_a_waiting_request_rises_one_level_at_a_time_and_drops_when_it_outlives_its_estimate(
    served_at: float, age_s: float, steps: int, outlived: int, later: list[float]
) -> None:
    level = Level(served_at, age_s)
    level.num_outlived = outlived
    assert level.at(served_at, steps) == min(LEVELS - 1, level_of(steps) + outlived)
    seen = [level.at(served_at + after, steps) for after in sorted(later)]
    assert seen == sorted(seen, reverse=True)
    assert all(level >= TOP for level in seen)
    for after in later:
        now = served_at + after
        assert level.rises_at(now) >= now
        assert level.at(level.rises_at(now), steps) == level.at(now, steps), "not before it has passed"


def test_in_the_last_level_a_request_falls_no_further() -> None:
    level = Level(0.0, 10.0)
    level.num_outlived = 3
    assert level.at(0.0, 10_000) == LEVELS - 1


def test_a_request_that_has_begun_rises_to_the_top_after_an_age() -> None:
    level = Level(0.0, 10.0)
    assert [level.at(now, 600, has_begun=True) for now in (0.0, 10.0, 10.1, 50.0)] == [4, 4, TOP, TOP]


def test_served_it_falls_back() -> None:
    level = Level(0.0, 10.0)
    assert level.at(25.0, 600) == 2
    assert level.at(1000.0, 600) == TOP
    level.served(25.0)
    assert level.at(26.0, 600) == 4


class TestOfARequest:
    POLICY = Policy(expected_output=40, age_s=5.0)

    def level(self, kept: Promise, now: float) -> int:
        return kept.standing(now, Work(), StepTimes(0.01, 0.02)).level

    def test_the_prediction_and_age(self) -> None:
        kept = promise(BE, self.POLICY)
        assert [self.level(kept, now) for now in (100.0, 105.1)] == [1, 0]

    def test_what_is_left_counts(self) -> None:
        kept = promise(BE, self.POLICY)
        for number in range(1, 10):
            kept.emitted(100.0, number)
        assert self.level(kept, 100.0) == 0

    def test_a_request_that_outlives_its_estimate_drops_below_the_new_level(self) -> None:
        kept = promise(BE, self.POLICY)
        for number in range(1, 41):
            kept.emitted(100.0, number)
        assert self.level(kept, 100.0) == level_of(40) + 1

    @pytest.mark.parametrize("way", ["emitted", "served"])
    def test_being_served_ends_the_wait(self, way: str) -> None:
        kept = promise(BE, self.POLICY)
        kept.emitted(120.0, 1) if way == "emitted" else kept.served(120.0)
        assert self.level(kept, 124.0) == level_of(40)

    def test_real_time_requests_have_no_level(self) -> None:
        assert self.level(promise(replace(BE, service=ServiceClass.RT), self.POLICY), 500.0) == 0


@pytest.mark.parametrize("service", ServiceClass)
class TestWhereAllRequestsHaveLevels:
    POLICY = Policy(SchedulerName.ALISE, expected_output=40, age_s=5.0)

    def level(self, service: ServiceClass, now: float, prompt: int = 0, output: int = 0) -> int:
        kept = promise(replace(BE, service=service), self.POLICY, output)
        return kept.standing(now, Work(prompt), StepTimes(0.01, 0.02)).level

    def test_both_classes_have_the_level_of_their_predicted_steps(self, service: ServiceClass) -> None:
        assert self.level(service, 100.0) == level_of(40)
        assert self.level(service, 100.0, output=20) == level_of(20)
        assert self.level(service, 100.0, prompt=100 * STEP_PROMPT) == level_of(140)

    def test_each_doubling_of_the_prediction_is_a_level(self, service: ServiceClass) -> None:
        assert self.level(service, 100.0, output=40) == level_of(40) + 1
        assert self.level(service, 100.0, output=80) == level_of(80) + 2

    def test_a_request_rises_with_its_age_and_does_not_fall_when_it_is_served(self, service: ServiceClass) -> None:
        kept = promise(replace(BE, service=service), self.POLICY)
        kept.served(105.0)
        kept.emitted(105.0, 1)
        levels = [kept.standing(now, Work(), StepTimes(0.01, 0.02)).level for now in (105.0, 105.1, 110.1, 900.0)]
        assert levels == [1, 0, TOP, TOP]
        assert kept.changes_at(105.1) == 110.0
