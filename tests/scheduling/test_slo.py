"""Deadlines by worked examples and by property: what was promised is conserved, and the order is total."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import ServiceClass, Slo
from alignedserve.scheduling.slo import (
    DECAY,
    MOST_MISSES,
    Late,
    Rank,
    RecentSteps,
    Standing,
    StepDues,
    StepTimes,
    TokenDues,
    Work,
    in_order,
    step_room_s,
    step_slack_s,
    token_slack_s,
)
from tests.samples import request

CHAT = replace(request(), slo=Slo(ttft_s=1.0, tbt_s=0.2), arrival_at=10.0)
DOCUMENT = replace(request(), service=ServiceClass.BE, slo=Slo(jct_s=4.0), arrival_at=10.0)
TIMES = StepTimes(mean_s=0.05, most_s=0.1)

seconds = st.floats(0, 100)
short = st.floats(0.001, 5)


class TestTokenDues:
    def test_the_first_token_then_each_after_the_one_before(self) -> None:
        dues = TokenDues(CHAT)
        assert dues.due_at(10.5) == 11.0
        dues.emitted(10.6)
        assert dues.due_at(10.6) == pytest.approx(10.8)
        dues.emitted(10.65)
        assert dues.due_at(10.7) == pytest.approx(10.85)

    def test_waiting_moves_nothing(self) -> None:
        """A preempted request's clock runs on."""
        dues = TokenDues(CHAT)
        dues.emitted(10.6)
        assert [dues.due_at(at) for at in (10.6, 10.7, 10.79)] == [pytest.approx(10.8)] * 3

    def test_each_miss_in_a_row_puts_the_next_due_further_off(self) -> None:
        dues = TokenDues(CHAT)
        dues.emitted(10.5)
        now, waits = 10.5, []
        for _ in range(6):
            now = dues.due_at(now) + 0.001
            waits.append(dues.due_at(now) - now)
        assert waits == pytest.approx([0.2 / DECAY**misses for misses in (1, 2, 3, 4, 4, 4)])
        assert dues.worth == pytest.approx(DECAY**MOST_MISSES)
        assert dues.is_late(now)

    def test_a_token_in_time_ends_the_row(self) -> None:
        dues = TokenDues(CHAT)
        dues.emitted(11.5)
        assert (dues.num_missed, dues.due_at(11.5)) == pytest.approx((1, 11.5 + 0.2 / DECAY))
        dues.emitted(11.6)
        assert (dues.num_missed, dues.due_at(11.6), dues.worth) == pytest.approx((0, 11.8, 1.0))

    @pytest.mark.parametrize("late", [Late.DROP_LAST, Late.KEEP])
    def test_without_decay_a_due_stays_where_it_was(self, late: Late) -> None:
        dues = TokenDues(CHAT, late)
        assert dues.due_at(20.0) == 11.0
        assert dues.is_late(20.0)
        dues.emitted(20.0)
        assert (dues.due_at(20.0), dues.worth) == pytest.approx((20.2, 1.0))
        assert dues.is_late(20.0)
        dues.emitted(20.1)
        assert not dues.is_late(20.1)

    @given(st.lists(st.tuples(short, st.booleans())), st.sampled_from(Late))
    def test_a_due_is_never_in_the_past_of_its_tokens(self, happened: list[tuple[float, bool]], late: Late) -> None:
        dues, now = TokenDues(CHAT, late), CHAT.arrival_at
        for wait_s, emits in happened:
            now += wait_s
            if emits:
                dues.emitted(now)
                assert dues.due_at(now) > now
            elif late is Late.DECAY:
                assert dues.due_at(now) >= now
            assert 0 < dues.worth <= 1


class TestStepDues:
    def test_equal_allowances_up_to_the_end_of_the_window(self) -> None:
        dues = StepDues(DOCUMENT, steps=4)
        seen = []
        for _ in range(4):
            seen.append(dues.due_at())
            dues.done()
        assert seen == [11.0, 12.0, 13.0, 14.0]
        assert dues.due_at() == 14.0

    @pytest.mark.parametrize(("ended_at", "left_s"), [(11.3, 0.7), (10.8, 1.2)], ids=["late", "early"])
    def test_what_a_step_takes_too_long_the_next_has_less(self, ended_at: float, left_s: float) -> None:
        """The example is AccelGen's propagation, with four steps in four seconds."""
        dues = StepDues(DOCUMENT, steps=4)
        dues.done()
        assert dues.due_at() - ended_at == pytest.approx(left_s)

    def test_another_prediction_spaces_the_rest_over_the_rest(self) -> None:
        dues = StepDues(DOCUMENT, steps=4)
        dues.done(2)
        dues.replan(now=11.5, steps_left=5)
        assert dues.due_at() == pytest.approx(12.0)
        dues.done(4)
        assert dues.due_at() == pytest.approx(14.0)

    def test_the_same_prediction_moves_nothing(self) -> None:
        dues = StepDues(DOCUMENT, steps=4)
        dues.done()
        dues.replan(now=11.7, steps_left=3)
        assert dues.due_at() == 12.0

    def test_after_its_window_it_is_late_and_its_dues_do_not_move(self) -> None:
        dues = StepDues(DOCUMENT, steps=4)
        dues.replan(now=20.0, steps_left=9)
        assert dues.is_late(20.0)
        assert dues.due_at() == 14.0

    @given(st.lists(st.tuples(short, st.integers(0, 40)), max_size=30), st.integers(1, 50))
    def test_the_whole_allowance_is_conserved(self, steps: list[tuple[float, int]], planned: int) -> None:
        """Used time and remaining time, over the remaining steps, add up to the window, whatever happens on the way."""
        dues, now = StepDues(DOCUMENT, planned), DOCUMENT.arrival_at
        for took_s, left in steps:
            now += took_s
            dues.done()
            if left:
                dues.replan(now, left)
            ahead = StepDues.__new__(StepDues)
            ahead.__dict__ |= dues.__dict__
            before, allowances = now, []
            for _ in range(ahead.num_left):
                allowances.append(ahead.due_at() - before)
                before = ahead.due_at()
                ahead.done()
            assert now + sum(allowances) == pytest.approx(14.0)


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


def test_slack_is_what_the_work_leaves_of_the_due() -> None:
    assert token_slack_s(11.0, 10.5, Work(transfer_s=0.05), TIMES) == pytest.approx(0.5 - 0.05 - 0.05)
    assert token_slack_s(11.0, 10.5, Work(prompt=500, chunk=200), TIMES) == pytest.approx(0.5 - 0.3)
    assert token_slack_s(11.0, 10.5, Work(prompt=500, chunk=200), TIMES, counts_chunks=False) == pytest.approx(0.4)
    assert step_slack_s(11.0, 10.5, TIMES) == pytest.approx(0.4)


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


class TestStepRoom:
    def test_the_due_less_what_comes_after_the_coming_step(self) -> None:
        assert step_room_s(TokenDues(CHAT), 10.6, steps=3, step_s=0.1, alone_s=0.01) == pytest.approx(0.2)

    def test_the_coming_step_may_take_all_that_is_left(self) -> None:
        assert step_room_s(TokenDues(CHAT), 10.6, steps=1, step_s=0.1, alone_s=0.01) == pytest.approx(0.4)

    @pytest.mark.parametrize("late", Late)
    def test_a_late_or_hopeless_request_does_not_bind(self, late: Late) -> None:
        assert step_room_s(TokenDues(CHAT, late), 11.1, steps=1, step_s=0.01, alone_s=0.01) == inf
        assert step_room_s(TokenDues(CHAT, late), 10.75, steps=3, step_s=0.1, alone_s=0.1) == inf

    def test_slow_steps_of_others_do_not_make_it_hopeless(self) -> None:
        """Otherwise the long steps that make it late would be taken for a reason to take more such steps."""
        assert step_room_s(TokenDues(CHAT), 10.9, steps=1, step_s=0.5, alone_s=0.01) == pytest.approx(0.1)

    @given(st.floats(10, 20), st.integers(1, 9), st.floats(0.001, 1))
    def test_a_step_within_the_room_leaves_it_in_time(self, now: float, steps: int, step_s: float) -> None:
        room_s = step_room_s(TokenDues(CHAT), now, steps, step_s, alone_s=0.001)
        if room_s < inf:
            assert now + room_s + (steps - 1) * step_s <= 11.0 + 1e-9


class TestGoingOnElsewhere:
    def test_another_part_goes_on_from_the_due(self) -> None:
        here = TokenDues(CHAT)
        here.emitted(10.4)
        there = TokenDues(CHAT, due=here.due)
        for now in (11.0, 11.3):
            here.emitted(now)
            there.emitted(now)
            assert there.due == here.due

    def test_a_next_attempt_owes_a_token_after_the_last_token_that_came(self) -> None:
        again = replace(CHAT, attempt=1, emitted=(5,), emitted_at=12.0)
        assert TokenDues(again).due_at(12.1) == pytest.approx(12.2)
