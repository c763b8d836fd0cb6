"""Expected waiting times: they follow the formula, and the order follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Entry, Request, Sampling, ServiceClass, Slo
from alignedserve.kvpool.grouping import WaitingEntry
from alignedserve.kvpool.memory.compression import WaitingOrder
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.messages import AskBatch
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.levels import AGE_S, InLine, expected_waits
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import StepTimes

BE, RT = ServiceClass.BE, ServiceClass.RT


def test_the_formula() -> None:
    line = [
        InLine(8.0, 0.0, None),
        InLine(4.0, 3.0, 0),
        InLine(100.0, 3.0, 1),
        InLine(1.0, 3.0, 1),
        InLine(1.0, 0, None),
    ]
    waits = list(expected_waits(line, mean_batch=4.0, age_s=10.0))
    assert waits == [0.0, 2.0, 3.0, 10.0 * 2 - 3.0, 113 / 4]


def test_a_request_that_has_waited_for_long_enough_comes_at_once() -> None:
    assert list(expected_waits([InLine(500.0, 0.0, None), InLine(1.0, 3 * AGE_S, 0)], 1.0)) == [0.0, 0.0]


@given(st.lists(st.builds(InLine, st.floats(0, 100), st.floats(0, 100), st.none()), max_size=8), st.floats(1, 64))
def test_real_time_requests_wait_as_they_stand_in_line(line: list[InLine], batch: float) -> None:
    waits = list(expected_waits(line, batch))
    assert waits == sorted(waits)


def waiting(name: str, service: ServiceClass = BE, since: float = 0.0, max_tokens: int = 100) -> WaitingEntry:
    slo = Slo(jct_s=86_400.0)
    request = Request(name, "gateway-0", 0, (1, 2), (), Sampling(), max_tokens, (), service, slo, since)
    return WaitingEntry(Entry(request, (5,), ()), promise(request, Policy(), 1), since)


def names(order: WaitingOrder, *entries: WaitingEntry, now: float) -> list[str]:
    return [entry.id for entry in order.longest_first(entries, now)]


def heard(policy: Policy) -> WaitingOrder:
    order = WaitingOrder(policy)
    order.heard(AskBatch(10, 1, StepTimes(0.1, 0.2), most_requests=4))
    return order


def test_last_in_the_order_of_arrival_waits_longest() -> None:
    order = heard(Policy(SchedulerName.FCFS))
    entries = [waiting(str(number), RT, since=float(number)) for number in range(4)]
    assert names(order, *entries, now=4.0) == ["3", "2", "1", "0"]


def test_best_effort_waits_for_real_time_until_it_is_old() -> None:
    """Two of thirty requests have less than ten seconds to wait: 9.9 s each, 1.2 requests at a time."""
    order = heard(Policy(age_s=10.0))
    rt, be = [waiting(f"rt{number}", RT, 100.0) for number in range(30)], waiting("be", BE, 100.0, max_tokens=20)
    assert names(order, *rt, be, now=100.0).index("be") == 28
    assert names(order, *rt, be, now=100.0 + 10.0).index("be") == 29, "as the first, which is served before it"


@pytest.mark.parametrize("policy", [Policy(), Policy(SchedulerName.FCFS)])
def test_every_request_has_one_place(policy: Policy) -> None:
    entries = [waiting(str(number), (BE, RT)[number % 2], float(number)) for number in range(9)]
    assert sorted(names(heard(policy), *entries, now=20.0)) == sorted(entry.id for entry in entries)
