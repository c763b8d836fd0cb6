"""No step is so long that a real-time request which arrives during it is late because of it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from alignedserve.core import KEY_SALT_SIZE, ServiceClass, Slo
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.promise import promise
from alignedserve.worker.step.arrival_forecast import COUNTED, LONGEST_S, MOST, SHORTEST_S, ArrivalForecast
from alignedserve.worker.step.request import WorkerRequest
from tests.samples import request


def coming(ttft_s: float, service: ServiceClass = ServiceClass.RT) -> WorkerRequest:
    new_request = replace(request("a"), service=service, slo=Slo(ttft_s=ttft_s, tbt_s=0.1))
    return WorkerRequest(new_request, promise(new_request, Policy()), [])


def test_nothing_is_bound_before_a_request_came_and_long_after() -> None:
    known = ArrivalForecast()
    assert known.bound_s(0.0) == inf
    known.count(coming(1.0, ServiceClass.BE), 0.1, 0.0)
    assert known.bound_s(0.0) == inf
    known.count(coming(1.0), 0.1, 0.0)
    assert known.bound_s(1.0) == MOST * 0.9
    assert known.bound_s(LONGEST_S) == inf


def test_each_caller_is_known_by_what_its_prompts_take() -> None:
    known = ArrivalForecast()
    for caller, prompt_s in (("a", 0.1), ("b", 0.3), ("a", 0.3)):
        chat = coming(1.0)
        chat.request = replace(chat.request, salt=caller * KEY_SALT_SIZE)
        known.count(chat, prompt_s, 0.0)
    assert known.firsts(1.0) == [("a" * KEY_SALT_SIZE, pytest.approx(0.11)), ("b" * KEY_SALT_SIZE, 0.3)]
    known.count(coming(1.0, ServiceClass.BE), 0.1, LONGEST_S)
    assert known.firsts(LONGEST_S) == []


def test_the_request_with_least_to_spare_counts() -> None:
    known = ArrivalForecast()
    known.count(coming(1.0), 0.1, 0.0)
    known.count(coming(0.5), 0.3, 1.0)
    known.count(coming(2.0), 0.1, 2.0)
    known.count(coming(0.5), 0.6, 3.0)  # late whatever the worker does
    assert known.bound_s(4.0) == MOST * (0.5 - 0.3)


def test_a_kind_that_comes_no_more_is_forgotten_though_others_go_on_coming() -> None:
    known = ArrivalForecast()
    known.count(coming(0.25), 0.0, 0.0)
    for number in range(COUNTED - 1):
        known.count(coming(1.0), 0.0, 1.0 + number)
        assert known.bound_s(1.0 + number) == MOST * 0.25
    known.count(coming(1.0), 0.0, 30.0)
    assert known.bound_s(30.0) == MOST * 1.0


def test_where_many_came_a_short_silence_says_that_nobody_comes() -> None:
    known = ArrivalForecast()
    for number in range(COUNTED):
        known.count(coming(0.5), 0.0, 2.0 * number)
    last = 2.0 * (COUNTED - 1)
    assert known.bound_s(last + 19.9) < inf  # ten times the interval between two arrivals
    assert known.bound_s(last + 20.1) == inf
    known.count(coming(1.0), 0.0, last + 21.0)  # the silence ended the earlier history
    assert known.bound_s(last + 21.0) == MOST * 1.0


def test_requests_of_a_burst_are_expected_for_some_time_after_it() -> None:
    known = ArrivalForecast()
    for _ in range(COUNTED):
        known.count(coming(0.5), 0.0, 7.0)
    assert known.bound_s(7.0 + 0.99 * SHORTEST_S) < inf
    assert known.bound_s(7.0 + SHORTEST_S) == inf


def began(known: ArrivalForecast, ttft_s: float, late_s: float, held_up_s: float = 10.0) -> None:
    running = coming(ttft_s)
    running.held_up_s = held_up_s
    known.learn(running, running.request.arrival_at + ttft_s + late_s)


def test_it_falls_with_first_tokens_that_steps_made_late_and_rises_with_those_in_time() -> None:
    known = ArrivalForecast()
    known.count(coming(1.0), 0.0, 0.0)
    began(known, 1.0, 0.001)
    once = known.bound_s(0.0)
    assert once < MOST
    for _ in range(100):
        began(known, 1.0, 1.0)
    least = known.bound_s(0.0)
    assert 0 < least < once
    for _ in range(49):  # fifty arrivals, of which one is late
        began(known, 1.0, -0.1)
    began(known, 1.0, 0.1)
    assert known.bound_s(0.0) <= least * 1.05
    for _ in range(400):
        began(known, 1.0, -0.1)
    assert known.bound_s(0.0) == MOST


def test_a_request_that_would_have_been_late_in_any_case_changes_nothing() -> None:
    known = ArrivalForecast()
    known.count(coming(1.0), 0.0, 0.0)
    began(known, 1.0, 0.2, held_up_s=0.0)
    began(known, 1.0, 0.2, held_up_s=0.1)
    assert known.bound_s(0.0) == MOST
    began(known, 1.0, 0.2, held_up_s=0.3)
    assert known.bound_s(0.0) < MOST


def test_a_request_with_much_time_is_not_held_to_what_requests_with_little_taught() -> None:
    known = ArrivalForecast()
    known.count(coming(1.0), 0.0, 0.0)
    for _ in range(100):
        began(known, 0.25, 0.1)
    assert known.bound_s(0.0) == MOST * 1.0
    known.count(coming(0.25), 0.0, 1.0)
    assert known.bound_s(1.0) < MOST * 0.25
