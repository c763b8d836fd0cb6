"""The expected length of an output: the prediction, within what the request says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import Choice, Estimate, Request, Sampling, ServiceClass, Slo
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.lengths import bounds, expected, hinted, outlived, room_for, tokens_left
from alignedserve.scheduling.policy import Policy, Predictor, Room
from alignedserve.scheduling.slo import StepTimes, Work
from tests.samples import request

ONE = request(prompt=10, max_tokens=1000)
POLICY = Policy(expected_output=100)


def told(mean: int, upper: int, of: Request = ONE) -> Request:
    return replace(of, estimate=Estimate(mean, upper))


@pytest.mark.parametrize(
    ("of", "wanted"),
    [
        (ONE, Estimate(100, 200)),
        (told(30, 70), Estimate(30, 70)),
        (told(30, 70, replace(ONE, max_tokens=50)), Estimate(30, 50)),
        (told(30, 70, replace(ONE, max_tokens=20)), Estimate(20, 20)),
        (told(30, 70, replace(ONE, stop_tokens=())), Estimate(1000, 1000)),
        (told(30, 70, replace(ONE, sampling=Sampling(min_tokens=40))), Estimate(40, 70)),
        (told(30, 70, replace(ONE, sampling=Sampling(min_tokens=80))), Estimate(80, 80)),
        (told(30, 70, replace(ONE, sampling=Sampling(grammar=Choice(((1,), (1, 2, 3)))))), Estimate(4, 4)),
    ],
    ids=["prior", "predicted", "capped", "capped below", "exact", "raised", "raised above", "one of these"],
)
def test_what_a_request_says_of_itself_outweighs_what_was_predicted(of: Request, wanted: Estimate) -> None:
    assert expected(of, POLICY) == wanted


def test_without_a_predictor_each_is_taken_to_say_all_that_it_may() -> None:
    off = replace(POLICY, predictor=Predictor.OFF)
    assert expected(ONE, off) == Estimate(1000, 1000)
    assert expected(told(30, 70), off) == Estimate(30, 70), "a client may say so all the same"


def test_without_a_stop_token_the_length_is_known() -> None:
    assert bounds(replace(ONE, stop_tokens=())) == (1000, 1000)
    assert bounds(ONE) == (1, 1000)


def test_a_hint_is_a_mean_of_which_twice_as_much_may_come() -> None:
    assert hinted(60) == Estimate(60, 120)


@pytest.mark.parametrize(("num_output", "wanted"), [(0, 30), (29, 30), (30, 60), (119, 120), (120, 200), (199, 200)])
def test_an_estimate_that_was_outlived_doubles(num_output: int, wanted: int) -> None:
    assert outlived(30, 200, num_output) == wanted


@pytest.mark.parametrize(
    ("room", "num_output", "tokens"),
    [
        (Room.WHOLE, 0, 1010),
        (Room.GROWING, 5, 15),
        (Room.CHUNKS, 5, 15),
    ],
)
def test_memory_is_given_at_once_or_for_what_a_request_has(room: Room, num_output: int, tokens: int) -> None:
    assert room_for(told(30, 70), num_output, replace(POLICY, room=room), most=4096) == tokens


@pytest.mark.parametrize("estimate", [(0, 0), (5, 4), (-1, 3)])
def test_an_estimate_is_of_a_token_or_more(estimate: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        Estimate(*estimate)


class TestPromises:
    """The holder of a request uses its estimate."""

    TIMES = StepTimes(mean_s=0.01, most_s=0.02)
    DOCUMENT = replace(ONE, service=ServiceClass.BE, slo=Slo(jct_s=100.0))

    def remaining(self, of: Request, num_output: int = 0) -> float:
        return promise(of, POLICY, num_output).standing(0.0, Work(), self.TIMES).remaining

    @pytest.mark.parametrize("of", [ONE, DOCUMENT], ids=["chat", "document"])
    def test_what_remains_is_of_the_estimate(self, of: Request) -> None:
        assert self.remaining(told(30, 70, of)) == 30
        assert self.remaining(told(30, 70, of), num_output=10) == 20
        assert self.remaining(told(30, 70, of), num_output=40) == 20, "60 in all"

    def test_a_prediction_moves_no_plan(self) -> None:
        """A plan by its own length would make a long document urgent at once, and all others would wait for it."""
        of_each = (self.DOCUMENT, told(10, 20, self.DOCUMENT), told(1000, 2000, self.DOCUMENT))
        assert [promise(of, POLICY).due_at(0.0) for of in of_each] == pytest.approx([1.0] * 3)

    def test_a_plan_that_was_outlived_is_spaced_anew(self) -> None:
        kept = promise(self.DOCUMENT, POLICY)
        kept.emitted(20.0, 100)
        assert kept.due_at(20.0) == pytest.approx(20.0 + 80.0 / 100)

    def test_the_pool_reckons_with_it(self) -> None:
        assert tokens_left(told(30, 70), POLICY, 10) == 20
