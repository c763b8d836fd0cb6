"""The gateway counts which promises were kept by the same rule as the simulator."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from alignedserve.core import ServiceClass, Slo
from alignedserve.gateway.http.metrics import PREFIX, HttpRecord, Metrics, RequestMeter

SLO = Slo(ttft_s=1.0, tbt_s=0.1)
STEADY = [0.09] * 200


def attained(first_s: float, gaps: Sequence[float]) -> bool:
    """Return whether a streamed request with these times counts as attained."""
    now, metrics = 0.0, Metrics()
    record = HttpRecord("request-0", "POST", "/v1/chat/completions", began_at=0.0)
    meter = RequestMeter(metrics, record, ServiceClass.RT, lambda: now, lambda _tokens: None, SLO)
    meter.open()
    for gap in (first_s, *gaps):
        now += gap
        meter.count_delivery(0, 5, 1)
        meter.count_write(0)
    record.finish = "stop"
    meter.close()
    return f'{PREFIX}slo_attained_total{{class="rt"}} 1.0' in metrics.series().decode()


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
