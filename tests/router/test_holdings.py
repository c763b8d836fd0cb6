"""The memory that several requests hold together."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import AttentionPattern, Estimate, Fold, Request, Retention, ServiceClass
from alignedserve.router.placing.held import Holdings
from alignedserve.scheduling.policy import Policy, Room
from tests.samples import request

GROWING = Policy()


def make_request(name: str = "a", mean: int = 50, upper: int = 100, prompt: int = 100) -> Request:
    return replace(request(name, prompt=prompt, max_tokens=1000), estimate=Estimate(mean, upper))


def together(policy: Policy, *some: Request) -> int:
    holdings = Holdings(policy)
    for each in some:
        holdings.put(each)
    return holdings.tokens


def test_a_request_alone_is_to_hold_what_open_requests_hold() -> None:
    """Mean 50 and upper 100: outputs of open requests have 50 + 50 * 50 * 2 / 5 / 50 tokens."""
    assert together(GROWING, make_request()) == 170


def test_surer_predictions_want_less_memory_and_never_more_than_their_upper_values() -> None:
    assert together(GROWING, make_request(mean=50, upper=50)) == 150
    assert together(GROWING, make_request(mean=50, upper=75)) == 155
    assert together(GROWING, make_request(mean=10, upper=100)) == 200


def test_without_a_prediction_it_is_the_upper_value_of_the_prior() -> None:
    unknown = replace(make_request(), estimate=None)
    assert together(GROWING, unknown) == 100 + 2 * GROWING.expected_output


def test_many_hold_little_more_than_their_prompts_and_half_of_the_longest_outputs() -> None:
    usual = 100 * (100 + 35)
    assert together(GROWING, *(make_request(str(number)) for number in range(100))) == usual + sqrt(100) * 35


def test_what_is_given_at_once_is_held_from_the_start() -> None:
    assert together(Policy(room=Room.WHOLE), *(make_request(str(number)) for number in range(10))) == 10 * 1100


def test_requests_that_fold_hold_a_share_of_what_is_behind_the_window() -> None:
    holdings = Holdings(GROWING, Retention(fold=Fold(AttentionPattern(100), 4)))
    long = [make_request(str(number), prompt=1300, mean=200, upper=200) for number in range(100)]
    for each in long:
        holdings.put(each)
    usual = 100 * (100 + 1200 // 4 + 200 // 4 // 2)
    assert holdings.tokens == usual + sqrt(100) * 25


def test_requests_that_drop_what_no_layer_reads_hold_no_more_than_the_rest() -> None:
    holdings = Holdings(GROWING, Retention(most=150))
    holdings.put(make_request("long", prompt=1000))
    assert holdings.tokens == 150
    holdings.put(make_request("short", prompt=100))
    assert holdings.tokens == 150 + 150


def test_nine_of_ten_moments_it_suffices() -> None:
    """Outputs have lengths as predicted, and each is at a moment of its own."""
    draw = Random(0)
    some = [make_request(str(number), mean, 2 * mean) for number in range(40) for mean in [draw.randrange(20, 400)]]
    wanted, enough = together(GROWING, *some), 0
    for _ in range(500):
        held = 0.0
        for each in some:
            assert each.estimate is not None
            length = draw.gauss(each.estimate.mean, each.estimate.mean / 1.28)  # nine of ten are under twice the mean
            held += len(each.prompt) + draw.random() * max(1.0, length)
        enough += held <= wanted
    assert enough >= 450


def test_requests_that_are_open_are_the_long_ones() -> None:
    """Three of four outputs have 20 tokens and one has 200, so of ten requests that are open about eight are long."""
    draw, enough = Random(0), 0
    wanted = together(GROWING, *(make_request(str(number), mean=65, upper=200) for number in range(40)))
    for _ in range(500):
        lengths = draw.choices([20, 200], weights=[3 * 20, 200], k=40)
        enough += sum(100 + draw.random() * length for length in lengths) <= wanted
    assert enough >= 450


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 99), st.booleans()), max_size=40))
def test_what_has_gone_is_not_counted(steps: list[tuple[int, int, bool]]) -> None:
    holdings, there = Holdings(GROWING), dict[str, Request]()
    for number, mean, comes in steps:
        name = str(number)
        if comes:
            there[name] = make_request(name, mean, 2 * mean)
            holdings.remove(name)
            holdings.put(there[name])
        else:
            there.pop(name, None)
            holdings.remove(name)
        assert len(holdings) == len(there)
        assert holdings.tokens == together(GROWING, *there.values())
        assert holdings.tokens == holdings.rt_tokens


def test_best_effort_requests_count_among_all_alone() -> None:
    holdings = Holdings(GROWING)
    holdings.put(replace(make_request("b"), service=ServiceClass.BE))
    assert (holdings.tokens, holdings.rt_tokens) == (170, 0)
    holdings.remove("b")
    assert (holdings.tokens, len(holdings)) == (0, 0)
