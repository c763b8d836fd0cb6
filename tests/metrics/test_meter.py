"""The gateway counts which promises were kept by the same rule as the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import Slo
from alignedserve.metrics.meter import RequestMeter
from alignedserve.metrics.requests import RequestMetrics
from tests.exposition import value
from tests.samples import request

SLO = Slo(ttft_s=1.0, tbt_s=0.1)
STEADY = [0.09] * 200


def attained(first_s: float, gaps: Sequence[float]) -> bool:
    """Return whether a streamed request with these times counts as attained."""
    now, metrics = 0.0, RequestMetrics(now=lambda: now)
    with RequestMeter(metrics, replace(request(), slo=SLO), "default", lambda: now) as meter:
        for gap in (first_s, *gaps):
            now += gap
            meter.deliver(1)
            meter.write()
        meter.finish = "stop"
    shown = "".join(metrics.blocks())
    is_attained = value(shown, 'alignedserve:slo_attained_total{class="rt"}') == 1
    assert value(shown, 'alignedserve:slo_attainment{class="rt",kind="all",tier="default"}') == is_attained
    return is_attained


def test_an_answer_that_is_written_after_its_end_is_in_time_where_it_came_in_time() -> None:
    """Choices of one body may end before their pieces are written."""
    now, metrics = 0.0, RequestMetrics(now=lambda: now)
    with RequestMeter(metrics, replace(request(), slo=SLO), "default", lambda: now) as meter:
        now = 0.5
        meter.deliver(1)
        meter.finish = "stop"
    meter.write()
    assert value("".join(metrics.blocks()), 'alignedserve:slo_attained_total{class="rt"}') == 1


def test_a_request_that_an_error_of_ours_ends_counts_too() -> None:
    metrics = RequestMetrics()
    with pytest.raises(RuntimeError), RequestMeter(metrics, request(), "default", lambda: 0.0):
        raise RuntimeError
    assert value("".join(metrics.blocks()), 'alignedserve:request_success_total{finished_reason="error"}') == 1


@pytest.mark.parametrize(
    ("first_s", "gaps", "is_attained"),
    [
        (0.9, [*STEADY, 0.5], True),  # one gap in two hundred is late
        (1.1, STEADY, False),
        (0.9, [*STEADY, 0.5, 0.5, 0.5], False),
        (0.9, [*STEADY, 1.2], False),  # a single gap is a stall
    ],
)
def test_promises_are_counted_as_in_the_simulator(first_s: float, gaps: list[float], is_attained: bool) -> None:
    assert attained(first_s, gaps) is is_attained
