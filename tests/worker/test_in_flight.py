"""Steps under way: which of them count, and when blocks that are given up meanwhile are free."""

from __future__ import annotations

import pytest

from alignedserve.cost.model import Shape
from alignedserve.worker.in_flight import StepsInFlight


def begun(*prefixes: int) -> StepsInFlight:
    """Begin a step for each prefix: the second is planned while the first runs."""
    steps = StepsInFlight()
    for prefix in prefixes:
        steps.begin((), (), Shape.build(prefixes=[prefix]), 0.01)
    return steps


def test_the_next_step_runs_when_the_step_before_has_ended() -> None:
    steps = begun(10, 11)
    assert steps.has_next
    ended = [steps.end(1), steps.end(2)]
    assert [(step.plan.number, step.shape, step.counts) for step in ended] == [
        (1, Shape.build(prefixes=[10]), True),
        (2, Shape.build(prefixes=[11]), True),
    ]
    assert steps.running is None
    assert not steps.has_next


def test_blocks_are_free_when_the_last_step_that_may_write_there_has_ended() -> None:
    steps = begun(10)
    assert steps.leave((0, 1))
    steps.begin((), (), Shape.build(prefixes=[11]), 0.01)
    assert steps.leave((2,))
    assert steps.left == [(0, 1), (2,)]
    assert steps.end(1).free == [(0, 1)]
    assert steps.left == [(2,)]
    assert steps.end(2).free == [(2,)]
    assert steps.left == []


def test_without_a_step_under_way_they_are_free_at_once() -> None:
    steps = begun(10)
    steps.end(1)
    assert not steps.leave((0,))
    assert steps.left == []


def test_a_step_that_fails_takes_the_next_with_it_and_no_other() -> None:
    steps = begun(10, 11)
    steps.end(1)
    steps.fail()
    assert steps.is_discarded
    steps.begin((), (), Shape.build(prefixes=[10]), 0.01)
    assert not steps.end(2).counts
    assert not steps.is_discarded
    assert steps.end(3).counts


def test_a_step_that_fails_alone_takes_nothing_with_it() -> None:
    steps = begun(10)
    steps.end(1)
    steps.fail()
    steps.begin((), (), Shape.build(prefixes=[10]), 0.01)
    assert not steps.is_discarded
    assert steps.end(2).counts


def test_what_has_not_begun_cannot_end() -> None:
    with pytest.raises(AssertionError, match="not begun"):
        StepsInFlight().end(1)


def test_only_a_step_in_flight_can_end() -> None:
    with pytest.raises(AssertionError, match="not in flight"):
        begun(10).end(2)


@pytest.mark.parametrize("first", ["amid", "step"])
def test_no_step_is_planned_ahead_while_one_is_ordered_for_a_pause(first: str) -> None:
    steps = StepsInFlight(looks_ahead=True)
    step = steps.begin((), (), Shape.build(prefixes=[10]), 0.01)
    assert steps.takes_next
    amid = steps.begin_amid((), Shape.build([(4, 0)]), 0.01)
    assert not steps.takes_next
    for plan in (amid, step) if first == "amid" else (step, amid):
        assert steps.end(plan.number).plan is plan
    assert steps.running is None
