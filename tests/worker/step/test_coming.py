"""No step is so long that a real-time request which arrives during it is late because of it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from alignedserve.core import KEY_SALT_SIZE, ServiceClass, Slo
from alignedserve.cost.fit import OnlineCost
from alignedserve.cost.model import Coefficients, CostModel, Kind, Uncertainty, length_of
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import StepTimes
from alignedserve.worker.pace import COUNTED, LONGEST_S, SHARE, ArrivalForecast, Pace
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import StepBounds
from tests.samples import LIMITS, request


def coming(ttft_s: float, service: ServiceClass = ServiceClass.RT) -> WorkerRequest:
    new_request = replace(request("a"), service=service, slo=Slo(ttft_s=ttft_s, tbt_s=0.1))
    return WorkerRequest(new_request, promise(new_request, Policy()), [])


def test_nothing_is_bound_before_a_request_came_and_long_after() -> None:
    known = ArrivalForecast()
    assert known.bound_s(0.0) == inf
    known.count(coming(1.0, ServiceClass.BE), 0.1, 0.0)
    assert known.bound_s(0.0) == inf
    known.count(coming(1.0), 0.1, 0.0)
    assert known.bound_s(1.0) == SHARE * 0.9
    assert known.bound_s(LONGEST_S) == inf


def test_each_caller_is_known_by_what_its_prompts_take() -> None:
    known = ArrivalForecast()
    for caller, prompt_s in (("a", 0.1), ("b", 0.3), ("a", 0.3)):
        chat = coming(1.0)
        chat.request = replace(chat.request, salt=caller * KEY_SALT_SIZE)
        known.count(chat, prompt_s, 0.0)
    assert dict(known.expected_chats(1.0)) == {"a" * KEY_SALT_SIZE: pytest.approx(0.11), "b" * KEY_SALT_SIZE: 0.3}
    known.count(coming(1.0, ServiceClass.BE), 0.1, LONGEST_S)
    assert known.expected_chats(LONGEST_S) == []


def test_callers_whose_chats_do_not_come_any_more_are_forgotten() -> None:
    """Else each step would look at all keys that have ever asked."""
    known = ArrivalForecast()
    for number in range(100):
        chat = coming(1.0)
        chat.request = replace(chat.request, salt=f"{number:0{KEY_SALT_SIZE}}")
        known.count(chat, 0.1, float(number))
    assert len(known._firsts) == LONGEST_S


def test_the_request_with_least_to_spare_counts() -> None:
    known = ArrivalForecast()
    known.count(coming(1.0), 0.1, 0.0)
    known.count(coming(0.5), 0.3, 1.0)
    known.count(coming(2.0), 0.1, 2.0)
    known.count(coming(0.5), 0.6, 3.0)  # late whatever the worker does
    assert known.bound_s(4.0) == SHARE * (0.5 - 0.3)


def test_a_kind_that_comes_no_more_is_forgotten_though_others_go_on_coming() -> None:
    known = ArrivalForecast()
    known.count(coming(0.25), 0.0, 0.0)
    for number in range(COUNTED - 1):
        known.count(coming(1.0), 0.0, 1.0 + number)
        assert known.bound_s(1.0 + number) == SHARE * 0.25
    known.count(coming(1.0), 0.0, 30.0)
    assert known.bound_s(30.0) == SHARE * 1.0


def test_where_many_came_a_short_silence_says_that_nobody_comes() -> None:
    known = ArrivalForecast()
    for number in range(COUNTED):
        known.count(coming(0.5), 0.0, 2.0 * number)
    last = 2.0 * (COUNTED - 1)
    assert known.bound_s(last + 19.9) < inf  # ten times the interval between two arrivals
    assert known.bound_s(last + 20.1) == inf
    known.count(coming(1.0), 0.0, last + 21.0)  # the silence ended the earlier history
    assert known.bound_s(last + 21.0) == SHARE * 1.0


def test_requests_of_a_burst_are_expected_for_some_time_after_it() -> None:
    known = ArrivalForecast()
    for _ in range(COUNTED):
        known.count(coming(0.5), 0.0, 7.0)
    assert known.bound_s(16.9) < inf
    assert known.bound_s(17.0) == inf


def test_only_for_chats_that_are_here_a_step_ends_with_certainty() -> None:
    """One step in ten thousand takes half longer than predicted."""
    known = Uncertainty(tails={length_of(0.075): 0.5})
    cost = CostModel(dict.fromkeys(Kind, Coefficients()), dict.fromkeys(Kind, known))
    at = StepContext(0.0, cost, StepTimes(), 512, 16, 64, Policy(), 64)
    assert StepBounds(prompts_s=0.09).careful_s(at) == pytest.approx(0.06)
    assert StepBounds(prompts_s=0.09, about_s=0.05).careful_s(at) == 0.05


class Reading(OnlineCost):
    """Cost model in which a millisecond goes for each prompt token, and for each token before them."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def model(self) -> CostModel:
        return CostModel({kind: Coefficients(token=(1e-3,), cached=1e-3) for kind in Kind})


def test_a_prompt_alone_takes_the_time_of_what_it_computes_behind_what_is_here() -> None:
    """Of 64 tokens 48 are here: the other 16 take 16 ms, and 48 ms to read those."""
    chat, pace = coming(1.0), Pace(WorkerSetup(LIMITS, cost=Reading()))
    chat.request = replace(chat.request, prompt=(1,) * 64)
    chat.found(48, version=0)
    pace.prompt_came(chat, 0.0)
    assert pace.context(0.0).max_step_for_arrivals_s == pytest.approx(SHARE * (1.0 - 0.064))
