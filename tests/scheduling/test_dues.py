"""Dues by worked examples and by property: what was promised is conserved, wherever the request goes on."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Due, Request, ServiceClass, Slo
from alignedserve.papers.names import SchedulerName
from alignedserve.scheduling.dues import DECAY, MOST_MISSES, StepPromise, TokenPromise
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Late, StepTimes, Work
from tests.samples import request

CHAT = replace(request(), slo=Slo(ttft_s=1.0, tbt_s=0.2), arrival_at=10.0)
DOCUMENT = replace(request(max_tokens=1000), service=ServiceClass.BE, slo=Slo(jct_s=4.0), arrival_at=10.0)
TIMES = StepTimes(mean_s=0.05, most_s=0.1)

short = st.floats(0.001, 5)


def chat(late: Late = Late.DECAY, asked: Request = CHAT, due: Due | None = None) -> TokenPromise:
    return TokenPromise(asked, Policy(late=late), 0, due)


def document(steps: int) -> StepPromise:
    """Return the promise of a document whose plan has `steps` steps; each of them brings a token."""
    return StepPromise(DOCUMENT, Policy(expected_output=steps), 0)


class TestTokens:
    def test_the_first_token_then_each_after_the_one_before(self) -> None:
        dues = chat()
        assert dues.due_at(10.5) == 11.0
        dues.emitted(10.6, 1)
        assert dues.due_at(10.6) == pytest.approx(10.8)
        dues.emitted(10.65, 1)
        assert dues.due_at(10.7) == pytest.approx(10.85)

    def test_dues_may_be_planned_earlier_than_promised(self) -> None:
        """Only the promised time counts as a miss: 0.8 of a ttft of 1 s and of a tbt of 0.2 s are planned for."""
        dues = TokenPromise(CHAT, Policy(slo_scale=0.8), 0)
        assert dues.due_at(10.5) == pytest.approx(10.8)
        assert dues.step_room_s(10.5, 1, 0.0, alone_s=0.2) == pytest.approx(0.3)
        assert dues.step_room_s(10.5, 1, 0.0, alone_s=0.4) == pytest.approx(0.5), "only the promise can be kept"
        assert dues.due_at(10.9) == pytest.approx(11.0)
        assert not dues.is_late(10.9)
        dues.emitted(10.95, 1)
        assert (dues.num_missed, dues.due_at(10.95)) == (0, pytest.approx(11.11))
        dues.emitted(11.14, 2)
        assert (dues.num_missed, dues.due_at(11.14)) == (0, pytest.approx(11.3))
        assert dues.is_late(11.35)
        assert dues.due_at(11.35) == pytest.approx(11.35 + 0.16 / DECAY)

    @pytest.mark.parametrize("num_output", [0, 3])
    def test_a_move_to_another_worker_hides_no_miss(self, num_output: int) -> None:
        """A request that moves after the planned time has no more time than one that stays."""
        promised_at = 11.0 if not num_output else 10.2  # CHAT arrives at 10 with a ttft of 1 s and a tbt of 0.2 s
        request = CHAT if not num_output else replace(CHAT, emitted_at=10.0)
        stays = TokenPromise(request, Policy(slo_scale=0.8), num_output)
        before = TokenPromise(request, Policy(slo_scale=0.8), num_output, stays.due)
        assert before.due_at(10.0) == pytest.approx(stays.due_at(10.0))
        assert not stays.is_late(promised_at - 0.01)
        moved = TokenPromise(request, Policy(slo_scale=0.8), num_output, stays.due)
        assert not moved.is_late(promised_at - 0.01)
        assert moved.is_late(promised_at + 0.01)

    @given(ahead=short, scale=st.floats(0.1, 1.0))
    def test_a_token_is_missed_after_the_promised_time_whatever_is_planned(self, ahead: float, scale: float) -> None:
        dues = TokenPromise(CHAT, Policy(slo_scale=scale), 0)
        dues.emitted(10.0 + ahead, 1)
        assert abs(ahead - 1.0) < 1e-9 or dues.has_missed == (ahead > 1.0)

    def test_waiting_moves_nothing(self) -> None:
        """A preempted request's clock runs on."""
        dues = chat()
        dues.emitted(10.6, 1)
        assert [dues.due_at(at) for at in (10.6, 10.7, 10.79)] == [pytest.approx(10.8)] * 3

    def test_each_miss_in_a_row_puts_the_next_due_further_off(self) -> None:
        dues = chat()
        dues.emitted(10.5, 1)
        now, waits = 10.5, []
        for _ in range(6):
            now = dues.due_at(now) + 0.001
            waits.append(dues.due_at(now) - now)
        assert waits == pytest.approx([0.2 / DECAY**misses for misses in (1, 2, 3, 4, 4, 4)])
        assert dues.worth == pytest.approx(DECAY**MOST_MISSES)
        assert dues.is_late(now)

    def test_a_token_in_time_ends_the_row(self) -> None:
        dues = chat()
        dues.emitted(11.5, 1)
        assert (dues.num_missed, dues.due_at(11.5)) == pytest.approx((1, 11.5 + 0.2 / DECAY))
        dues.emitted(11.6, 1)
        assert (dues.num_missed, dues.due_at(11.6), dues.worth) == pytest.approx((0, 11.8, 1.0))

    @pytest.mark.parametrize("late", [Late.DROP_LAST, Late.KEEP])
    def test_without_decay_a_due_stays_where_it_was(self, late: Late) -> None:
        dues = chat(late)
        assert dues.due_at(20.0) == 11.0
        assert dues.is_late(20.0)
        dues.emitted(20.0, 1)
        assert (dues.due_at(20.0), dues.worth) == pytest.approx((20.2, 1.0))
        assert dues.is_late(20.0)
        dues.emitted(20.1, 1)
        assert not dues.is_late(20.1)

    @given(st.lists(st.tuples(short, st.booleans())), st.sampled_from(Late))
    def test_a_due_is_never_in_the_past_of_its_tokens(self, happened: list[tuple[float, bool]], late: Late) -> None:
        dues, now = chat(late), CHAT.arrival_at
        for wait_s, emits in happened:
            now += wait_s
            if emits:
                dues.emitted(now, 1)
                assert dues.due_at(now) > now
            elif late is Late.DECAY:
                assert dues.due_at(now) >= now
            assert 0 < dues.worth <= 1


class TestSteps:
    def test_equal_allowances_up_to_the_end_of_the_window(self) -> None:
        dues = document(steps=4)
        seen = [dues.due_at(10.0)]
        for number in range(1, 4):
            dues.emitted(10.0, number)
            seen.append(dues.due_at(10.0))
        assert seen == [11.0, 12.0, 13.0, 14.0]

    @pytest.mark.parametrize(("ended_at", "left_s"), [(11.3, 0.7), (10.8, 1.2)], ids=["late", "early"])
    def test_what_a_step_takes_too_long_the_next_has_less(self, ended_at: float, left_s: float) -> None:
        """The example is AccelGen's propagation, with four steps in four seconds."""
        dues = document(steps=4)
        dues.emitted(ended_at, 1)
        assert dues.due_at(ended_at) - ended_at == pytest.approx(left_s)

    def test_a_request_that_outlives_its_plan_has_the_rest_spaced_over_the_rest(self) -> None:
        """Four more steps than the plan of four are expected at 12 s: they have half a second each."""
        dues = document(steps=4)
        for number in range(1, 5):
            dues.emitted(12.0, number)
        assert dues.due_at(12.0) == pytest.approx(12.5)
        for number in range(5, 8):
            dues.emitted(12.0, number)
        assert dues.due_at(12.0) == pytest.approx(14.0)

    def test_after_its_window_it_is_late_and_its_dues_do_not_move(self) -> None:
        dues = document(steps=4)
        for number in range(1, 10):
            dues.emitted(20.0, number)
        assert dues.is_late(20.0)
        assert dues.due_at(20.0) == 14.0
        assert dues.changes_at(20.0) == 140.0, "its level rises 120 s after its last token"

    @given(st.lists(short, max_size=60), st.integers(1, 50))
    def test_the_whole_allowance_is_conserved(self, steps: list[float], planned: int) -> None:
        """Used time and remaining time, over the remaining steps, add up to the window, whatever happens on the way."""
        dues, now, whole = document(planned), DOCUMENT.arrival_at, planned
        for number, took_s in enumerate(steps, 1):
            now += took_s
            dues.emitted(now, number)
            whole = 2 * whole if number == whole else whole
            ahead, before, allowances = copy(dues), now, []
            for later in range(number + 1, whole + 1):
                allowances.append(ahead.due_at(now) - before)
                before = ahead.due_at(now)
                if later < whole:
                    ahead.emitted(now, later)
            assert now + sum(allowances) == pytest.approx(14.0)


def test_slack_is_what_the_work_leaves_of_the_due() -> None:
    whole, by_due = (TokenPromise(CHAT, Policy(name), 0) for name in (SchedulerName.BROS, SchedulerName.ALIGNED))
    assert by_due.standing(10.5, Work(transfer_s=0.05), TIMES).slack_s == pytest.approx(0.5 - 0.05 - 0.05)
    assert whole.standing(10.5, Work(prompt=500, chunk=200), TIMES).slack_s == pytest.approx(0.5 - 0.3)
    assert by_due.standing(10.5, Work(prompt=500, chunk=200), TIMES).slack_s == pytest.approx(0.4)
    assert document(steps=4).standing(10.5, Work(), TIMES).slack_s == pytest.approx(0.4)


class TestStepRoom:
    def test_the_due_less_what_comes_after_the_coming_step(self) -> None:
        assert chat().step_room_s(10.6, steps=3, step_s=0.1, alone_s=0.01) == pytest.approx(0.2)

    def test_the_coming_step_may_take_all_that_is_left(self) -> None:
        assert chat().step_room_s(10.6, steps=1, step_s=0.1, alone_s=0.01) == pytest.approx(0.4)

    @pytest.mark.parametrize("late", Late)
    def test_a_late_or_hopeless_request_does_not_bind(self, late: Late) -> None:
        assert chat(late).step_room_s(11.1, steps=1, step_s=0.01, alone_s=0.01) == inf
        assert chat(late).step_room_s(10.75, steps=3, step_s=0.1, alone_s=0.1) == inf

    def test_slow_steps_of_others_do_not_make_it_hopeless(self) -> None:
        """Otherwise the long steps that make it late would be taken for a reason to take more such steps."""
        assert chat().step_room_s(10.9, steps=1, step_s=0.5, alone_s=0.01) == pytest.approx(0.1)

    @given(st.floats(10, 20), st.integers(1, 9), st.floats(0.001, 1))
    def test_a_step_within_the_room_leaves_it_in_time(self, now: float, steps: int, step_s: float) -> None:
        room_s = chat().step_room_s(now, steps, step_s, alone_s=0.001)
        if room_s < inf:
            assert now + room_s + (steps - 1) * step_s <= 11.0 + 1e-9


class TestGoingOnElsewhere:
    def test_another_part_goes_on_from_the_due(self) -> None:
        here = chat()
        here.emitted(10.4, 1)
        there = chat(due=here.due)
        for now in (11.0, 11.3):
            here.emitted(now, 1)
            there.emitted(now, 1)
            assert there.due == here.due

    def test_a_next_attempt_owes_a_token_after_the_last_token_that_came(self) -> None:
        again = replace(CHAT, attempt=1, emitted=(5,), emitted_at=12.0)
        assert chat(asked=again).due_at(12.1) == pytest.approx(12.2)
