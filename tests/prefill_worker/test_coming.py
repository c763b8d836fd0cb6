"""No step is so long that a real-time request which comes in its middle is late for that."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from alignedserve.core import ServiceClass, Slo
from alignedserve.policy import Policy
from alignedserve.prefill_worker.coming import LATELY_S, Coming
from alignedserve.promise import promise
from alignedserve.running import Running
from tests.samples import request


def coming(ttft_s: float, service: ServiceClass = ServiceClass.RT) -> Running:
    one = replace(request("a"), service=service, slo=Slo(ttft_s=ttft_s, tbt_s=0.1))
    return Running(one, promise(one, Policy()), [])


def test_nothing_is_bound_before_one_came_and_long_after() -> None:
    known = Coming()
    assert known.bound_s(0.0) == inf
    known.came(coming(1.0, ServiceClass.BE), 0.1, 0.0)
    assert known.bound_s(0.0) == inf
    known.came(coming(1.0), 0.1, 0.0)
    assert known.bound_s(1.0) == 0.45
    assert known.bound_s(LATELY_S) == inf


def test_the_one_with_least_to_spare_counts() -> None:
    known = Coming()
    known.came(coming(1.0), 0.1, 0.0)
    known.came(coming(0.5), 0.3, 1.0)
    known.came(coming(2.0), 0.1, 2.0)
    known.came(coming(0.5), 0.6, 3.0)  # late whatever is done
    assert known.bound_s(4.0) == 0.5 * (0.5 - 0.3)


def test_it_falls_with_first_tokens_that_are_late_and_rises_with_those_in_time() -> None:
    known = Coming()
    known.came(coming(1.0), 0.0, 0.0)
    known.began(-0.001)
    once = known.bound_s(0.0)
    assert once < 0.5
    for _ in range(100):
        known.began(-1.0)
    least = known.bound_s(0.0)
    assert 0 < least < once
    for _ in range(19):  # of twenty, with one late
        known.began(0.1)
    known.began(-0.1)
    assert known.bound_s(0.0) <= least * 1.05
    for _ in range(200):
        known.began(0.1)
    assert known.bound_s(0.0) == 0.5
