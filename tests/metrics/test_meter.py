"""The gateway counts which promises were kept by the same rule as the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.config.config import Config, load
from alignedserve.config.prices import Prices
from alignedserve.core import ServiceClass, Slo, Spent
from alignedserve.lab.loads.figures.request_figures import attains
from alignedserve.lab.loads.records.records import RequestOutcome, RequestRecord
from alignedserve.metrics.meter import RequestMeter
from alignedserve.metrics.requests import KEPT_S, RequestMetrics
from alignedserve.metrics.series import merge
from alignedserve.owner.client import Overloaded
from tests.exposition import value
from tests.samples import request

OVERLOADED = Overloaded("it would be late", 1.0)
SLO = Slo(ttft_s=1.0, tbt_s=0.1)
STEADY = [0.09] * 200


def attained(first_s: float, writes: Sequence[tuple[float, int]]) -> bool:
    """Return whether a streamed request counts as attained: its first token, then pieces by gap and tokens."""
    now, metrics = 0.0, RequestMetrics(now=lambda: now)
    with RequestMeter(metrics, replace(request(), slo=SLO, arrival_at=0.0), "default", lambda: now) as meter:
        for gap_s, tokens in ((first_s, 1), *writes):
            now += gap_s
            meter.deliver(tokens)
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


@pytest.mark.parametrize(("error", "why"), [(RuntimeError(), "error"), (OVERLOADED, "refused")])
def test_a_request_that_failed_or_was_refused_did_not_get_what_was_promised(error: Exception, why: str) -> None:
    metrics = RequestMetrics()
    with pytest.raises(type(error)), RequestMeter(metrics, request(), "default", lambda: 0.0):
        raise error
    shown = "".join(metrics.blocks())
    assert value(shown, f'alignedserve:slo_missed_total{{class="rt",why="{why}"}}') == 1
    assert value(shown, 'alignedserve:slo_attainment{class="rt",kind="all",tier="default"}') == 0


@pytest.mark.parametrize("error", [None, RuntimeError(), OVERLOADED])
def test_no_promise_counts_for_a_request_that_asked_for_none(error: Exception | None) -> None:
    """It waits in line instead: a crowd of such requests says nothing of the promises that were asked for."""
    now, metrics = 0.0, RequestMetrics(now=lambda: now)
    unasked = replace(request(), slo=replace(SLO, is_asked=False), arrival_at=0.0)
    with suppress(RuntimeError, Overloaded), RequestMeter(metrics, unasked, "default", lambda: now) as meter:
        now = 60.0
        if error is not None:
            raise error
        meter.deliver(1)
        meter.write()
        meter.finish = "stop"
    shown = "".join(metrics.blocks())
    assert value(shown, 'alignedserve:slo_attained_total{class="rt"}') == 0
    for why in ("ttft", "error", "refused"):
        assert value(shown, f'alignedserve:slo_missed_total{{class="rt",why="{why}"}}') == 0
    assert "slo_attainment{" not in shown
    if error is None:
        assert value(shown, 'alignedserve:time_to_first_token_seconds_count{class="rt"}') == 1
        (ended,) = metrics.log.recent(60.0).slowest
        assert (ended.missed, ended.ttft_s, ended.is_asked) == ("", 0.0, False)


@pytest.mark.parametrize(
    ("first_s", "gaps", "is_attained"),
    [
        (0.9, [*STEADY, 0.5], True),  # one gap in two hundred is late
        (1.1, STEADY, False),
        (0.9, [*STEADY, 0.5, 0.5, 0.5], False),
        (0.9, [*STEADY, 1.2], False),  # a single gap is a stall
    ],
)
def test_what_a_kept_promise_is(first_s: float, gaps: list[float], is_attained: bool) -> None:
    assert attained(first_s, [(gap, 1) for gap in gaps]) is is_attained


@given(
    first_s=st.sampled_from((0.5, 1.0, 1.5)),
    writes=st.lists(st.tuples(st.sampled_from((0.0625, 0.125, 0.75, 2.0)), st.integers(1, 60)), max_size=12),
)
def test_server_client_and_simulator_agree_on_it(first_s: float, writes: list[tuple[float, int]]) -> None:
    """A client that reads each piece as it is written counts as the server does, also where pieces have many tokens."""
    token_at, now = [first_s], first_s
    for gap_s, tokens in writes:
        now += gap_s
        token_at += [now] * tokens
    record = RequestRecord("a", ServiceClass.RT, SLO, 0.0, 3, token_at, RequestOutcome.FINISHED, now)
    assert attained(first_s, writes) is attains(record)


def test_what_requests_use_counts_for_their_class_and_key_whatever_their_end() -> None:
    metrics = RequestMetrics()
    with RequestMeter(metrics, request(), "default", lambda: 0.0, "acme") as meter:
        meter.deliver(1, spent=Spent(0.25, 10.0, "nvml"))
        meter.deliver(1, spent=Spent(0.25, 10.0, "nvml"))
        meter.deliver(1, spent=Spent(1.0, 30.0, "nvml"))  # and its client leaves
    with RequestMeter(metrics, replace(request(), service=ServiceClass.BE), "default", lambda: 0.0, "acme") as meter:
        meter.deliver(1, spent=Spent(2.0, 60.0, "nvml"))
        meter.finish = "stop"
    shown = "".join(metrics.blocks())
    for service, seconds, joules in (("rt", 1.0, 30.0), ("be", 2.0, 60.0)):
        assert value(shown, f'alignedserve:request_device_seconds_total{{class="{service}",key="acme"}}') == seconds
        assert value(shown, f'alignedserve:request_energy_joules_total{{class="{service}",key="acme"}}') == joules
    (used,) = metrics.log.recent(0.0).keys
    assert (used.key, used.device_s, used.joules) == ("acme", 2.0, 60.0), "of requests that ended"


def test_keys_share_the_price_of_what_was_used_as_prices_were_then() -> None:
    prices = Prices.from_config(load({"engine.tensor_parallel_size": 2, "price.device_hour": 3.6}, {}, None))
    metrics = RequestMetrics(prices=prices)

    def use(key: str, *uses: Spent) -> float:
        with RequestMeter(metrics, request(), "default", lambda: 0.0, key) as meter:
            for spent in uses:
                meter.deliver(1, spent=spent)
            meter.finish = "stop"
        return meter.use.charged.price

    assert use("ann", Spent(1.0, 30.0), Spent(2.0, 60.0)) == pytest.approx(0.004), "two devices in each second"
    prices.reload(load({"price.kwh": 0.36}, {}, None))
    assert use("ann", Spent(1.0, 10_000.0)) + use("bob", Spent(1.0, 20_000.0)) == pytest.approx(0.003)
    prices.reload(Config())
    assert use("eve", Spent(1.0, 30.0)) == 0.0
    shown = "".join(metrics.blocks())
    for key, price in (("ann", 0.005), ("bob", 0.002)):
        assert value(shown, f'alignedserve:request_price_total{{class="rt",key="{key}"}}') == pytest.approx(price)
    assert shown.count("request_price_total{") == 2
    assert [round(used.price, 9) for used in metrics.log.recent(0.0).keys] == [0.005, 0.002, 0.0]


def test_what_is_told_after_a_request_has_ended_counts_too() -> None:
    metrics = RequestMetrics()
    with RequestMeter(metrics, request(), "default", lambda: 0.0, "acme") as meter:
        pass  # its client leaves before its first token
    meter.use.charge(Spent(0.25, 10.0, "nvml"))
    meter.use.charge(Spent(0.75, 30.0, "nvml"))
    meter.use.charge(Spent(0.5, 20.0, "nvml"))  # it waited to be read
    shown = "".join(metrics.blocks())
    assert value(shown, 'alignedserve:request_device_seconds_total{class="rt",key="acme"}') == 0.75
    assert value(shown, 'alignedserve:prompt_tokens_total{class="rt"}') == 0


def test_the_series_of_a_key_that_counts_no_more_go_when_a_bill_has_them() -> None:
    known, now = {"ann", "bob"}, 0.0
    metrics = RequestMetrics(now=lambda: now, knows_key=lambda key: key in known)
    for key in ("ann", "bob"):
        metrics.count_use(ServiceClass.BE, key, Spent(1.0, 2.0))

    def shown() -> set[str]:
        return {key for key in ("ann", "bob") if f'key="{key}"' in "".join(metrics.blocks())}

    known -= {"ann"}
    assert shown() == {"ann", "bob"}
    now = KEPT_S - 1
    assert shown() == {"ann", "bob"}
    now = KEPT_S + 1
    assert shown() == {"bob"}
    metrics.count_use(ServiceClass.BE, "ann", Spent(0.5, 1.0))  # of its last step
    known |= {"ann"}
    assert shown() == {"ann", "bob"}, "the key has come again"


def test_the_use_of_a_thousand_keys_is_written_in_short_blocks() -> None:
    metrics = RequestMetrics()
    for number in range(1_000):
        metrics.count_use(ServiceClass.RT, f"key-{number}", Spent(1.0, 2.0))
    blocks = [*metrics.blocks()]
    assert max(block.count("\n") for block in blocks) <= 202
    whole = merge(blocks)
    assert whole.count("# TYPE alignedserve:request_energy_joules_total counter") == 1
    for number in (0, 500, 999):
        assert value(whole, f'alignedserve:request_energy_joules_total{{key="key-{number}"}}') == 2.0
