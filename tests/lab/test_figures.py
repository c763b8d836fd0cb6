"""Every figure of a report, compared with a calculation by hand."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import Role, Usage
from alignedserve.lab.loads.figures.request_figures import attains, attains_p99
from alignedserve.lab.loads.records.distribution import Distribution, percentile
from alignedserve.lab.loads.records.records import CopyRecord, RequestOutcome, RequestRecord, RunRecord
from alignedserve.lab.reports.figures import RunFigures, figure_tree, steps_in_slo
from tests.conftest import examples
from tests.simulator.runs import MIXED, decode_step, record, rt

FIGURES = RunFigures.from_record(MIXED)


def test_a_percentile_is_the_smallest_value_that_so_many_percent_do_not_exceed() -> None:
    hundred = [float(value) for value in range(1, 101)]
    assert [percentile(hundred, percent) for percent in (0, 1, 50, 90, 99, 100)] == [1, 1, 50, 90, 99, 100]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([1.0, 2.0], 99) == 2.0
    assert isnan(percentile([], 50))


def test_a_distribution() -> None:
    assert Distribution.from_values([4.0, 1.0, 1.0]) == Distribution(
        count=3, mean=2.0, p50=1.0, p90=4.0, p95=4.0, p99=4.0, most=4.0
    )


def test_requests_are_counted_by_their_end() -> None:
    counted = FIGURES.requests
    assert (counted.count, counted.finished, counted.refused, counted.unfinished) == (7, 5, 1, 1)
    assert (counted.left, counted.broken, counted.preemptions) == (0, 0, 0)
    assert counted.output_tokens == 14
    assert FIGURES.tokens_per_s == pytest.approx(1.4)


def test_real_time() -> None:
    """Only "quick" of four attains. In time: 3 of 3 tokens, 1 of 2, 2 of 3, and no token of the refused request."""
    found = FIGURES.rt
    assert found.attainment == 1 / 4
    assert found.ttft_attainment == 2 / 4
    assert found.tbt_attainment == 2 / 4
    assert found.tokens_in_time == 6 / 9
    assert (found.ttft_s.p50, found.ttft_s.p90, found.ttft_s.most) == (0.5, 1.5, 1.5)
    assert found.ttft_s.mean == pytest.approx((0.3 + 1.5 + 0.5) / 3)
    assert found.tbt_s.count == 5
    assert found.tbt_s.mean == pytest.approx((0.1 + 0.1 + 0.1 + 0.5 + 0.1) / 5)
    assert found.tbt_s.most == 0.5
    assert found.mean_tpot_s.mean == pytest.approx((0.1 + 0.1 + 0.3) / 3)
    assert found.end_to_end_s.mean == pytest.approx((0.5 + 1.6 + 1.1) / 3)


def test_a_request_may_break_one_gap_in_a_hundred() -> None:
    times = [0.1 * number for number in range(102)]
    at_most_one = rt("r", 0.0, *times[:51], *(time + 0.8 for time in times[51:]))
    two = rt("r", 0.0, *times[:30], *(time + 0.8 for time in times[30:60]), *(time + 1.6 for time in times[60:]))
    assert attains(at_most_one)
    assert not attains(two)


def test_a_single_stall_breaks_the_promise() -> None:
    """The P99 of 101 gaps forgives a gap of any length; the attainment does not."""
    times = [0.1 * number for number in range(102)]
    stalled = rt("r", 0.0, *times[:51], *(time + 1.0 for time in times[51:]))
    assert attains_p99(stalled)
    assert not attains(stalled)
    found = RunFigures.from_record(record([stalled])).rt
    assert (found.attainment, found.p99_attainment, found.stalled) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize("outcome", [outcome for outcome in RequestOutcome if outcome is not RequestOutcome.FINISHED])
def test_whoever_did_not_finish_is_a_miss(outcome: RequestOutcome) -> None:
    found = RunFigures.from_record(record([rt("r", 0.0, 0.1, 0.2, outcome=outcome)]))
    assert (found.rt.attainment, found.rt.tokens_in_time) == (0.0, 2 / 3)
    assert found.papers.accelgen.goodput == 0.0
    assert found.papers.bros.attainment == 0.0


def test_best_effort() -> None:
    """ "soon" and "slow" bring 5 tokens in 10 seconds; "slow" breaks its window of 10 s, "open" has not ended."""
    found = FIGURES.be
    assert found.tokens_per_s == 0.5
    assert found.requests_per_s == 0.2
    assert found.jct_attainment == 1 / 3
    assert (found.jct_s.p50, found.jct_s.most) == (4.0, 10.5)


def test_steps() -> None:
    found = FIGURES.steps
    assert (found.count, found.prefill, found.decode, found.mixed) == (6, 2, 4, 0)
    assert found.seconds.mean == pytest.approx(1.0 / 6)
    assert (found.tokens.most, found.tokens.p50) == (50, 2)


def test_spread_and_bubble() -> None:
    """The spreads are 0, 0, 40, 10. Of 10 + 11 + 150 + 40 places, 10 + 11 + 90 + 30 are filled."""
    found = FIGURES.steps.spread
    assert (found.mean, found.p90) == (12.5, 40)
    assert found.bubble_share == pytest.approx(70 / 211)


def test_prediction_errors_are_of_the_steps_that_were_predicted() -> None:
    found = FIGURES.steps.prediction
    assert (found.all.count, found.decode.count, found.prefill.count, found.mixed.count) == (3, 3, 0, 0)
    assert found.decode.p50 == pytest.approx(0.1)
    assert found.decode.p90 == pytest.approx(0.2)
    assert isnan(found.prefill.p50)


def test_workers_and_copies() -> None:
    (worker,) = FIGURES.workers
    assert (worker.name, worker.steps) == ("decode-0", 6)
    assert worker.step_share == pytest.approx(0.1)
    assert worker.copy_share == pytest.approx(0.075)
    assert worker.kv_wait_share == pytest.approx(0.05), "the copy from 4 to 4.5, not that from the device"
    assert FIGURES.mean_step_share == worker.step_share
    copies = FIGURES.copies
    assert (copies.count, copies.to_device, copies.tokens, copies.seconds) == (2, 1, 96, 0.75)


def test_waiting_for_kv_is_time_without_a_step_in_which_kv_comes() -> None:
    """Steps run from 1 to 2 and from 3 to 4; KV comes from 1.5 to 3.5 by two ways, and from 6 to 7."""
    record = RunRecord(
        *(0.0, 10.0, 1.0, {"decode-0": Role.DECODE}),
        steps=[decode_step(1.0, 1.0, [10]), decode_step(3.0, 1.0, [10])],
        copies=[CopyRecord("decode-0", 1.5, 1.0, True, 64, aside=True), CopyRecord("decode-0", 6.0, 1.0, True, 64)],
        received=[CopyRecord("decode-0", 1.75, 1.75, True, 64, aside=True)],
    )
    (worker,) = RunFigures.from_record(record).workers
    assert worker.kv_wait_share == pytest.approx(0.2)


def test_speed() -> None:
    assert (FIGURES.speed.simulated_s_per_wall_s, FIGURES.speed.steps_per_wall_s) == (5.0, 3.0)


class TestPapers:
    FOUND = FIGURES.papers

    def test_alignedserve(self) -> None:
        assert self.FOUND.alignedserve.decode_tokens_per_s == pytest.approx(0.7)
        assert self.FOUND.alignedserve.p99_tpot_s == 0.2

    def test_bros(self) -> None:
        """TTFT 0.3, 1.5, 0.5; mean TPOT 0.1, 0.1, 0.3; end to end 0.5, 1.6, 1.1 over 3, 2, 3 tokens."""
        found = self.FOUND.bros
        assert (found.ttft_attainment, found.tpot_attainment, found.attainment) == (1 / 4, 2 / 4, 1 / 4)
        assert found.normalised_latency_s == pytest.approx((0.5 / 3 + 1.6 / 2 + 1.1 / 3) / 3)
        assert found.be_requests_per_s == 0.2

    def test_alise(self) -> None:
        """All finished requests count: the BE requests take 4 s for 2 tokens and 10.5 s for 3."""
        assert self.FOUND.alise.normalised_latency_s == pytest.approx(
            (0.5 / 3 + 1.6 / 2 + 1.1 / 3 + 4 / 2 + 10.5 / 3) / 5
        )

    def test_accelgen(self) -> None:
        """The fourth step brings the late first token of "late", the last step the late second token of "halting"."""
        found = self.FOUND.accelgen
        assert steps_in_slo(MIXED) == [True, True, True, False, True, False]
        assert found.steps_in_slo == 4 / 6
        assert found.jct_attainment == 4 / 7  # all but "refused", "slow" and "open"
        assert found.goodput == 0.2  # "quick" and "soon"
        assert found.budget_used == pytest.approx((0.5 + 0.01 + 0.01 + 0.2 + 0.03 + 0.02) / 6)
        assert found.kv_allocated == pytest.approx(0.5 * 0.25 + 0.5 * 0.75)  # each for half of the seconds

    def test_apt_serve(self) -> None:
        assert (self.FOUND.apt_serve.attainment, self.FOUND.apt_serve.attained_per_s) == (1 / 4, 0.1)

    def test_a_token_that_never_arrived_makes_no_step_late(self) -> None:
        left = rt("left", 0.0, 0.3, outcome=RequestOutcome.LEFT)
        steps = [decode_step(0.2, 0.1, [5], emitted=("left",)), decode_step(0.3, 0.1, [6], emitted=("left",))]
        assert steps_in_slo(record([left], steps)) == [True, True]

    def test_steps_of_several_workers_count_in_the_order_of_their_ends(self) -> None:
        requests = [rt("quick", 0.0, 0.3, 0.4), rt("late", 0.0, 9.0)]
        first = decode_step(0.2, 0.1, [5], emitted=("quick",))._replace(worker="prefill-0")
        second = decode_step(0.3, 0.1, [6], emitted=("quick", "late"))
        assert steps_in_slo(record(requests, [second, first])) == [True, False]


def test_the_pool() -> None:
    """Twenty pages are reported twice: RT requests have 3 and 5 of 40."""
    told = [
        Usage(rt=3, be=1, shared=2, idle=4, leased=0, free=10),
        Usage(rt=5, be=1, shared=0, idle=4, leased=4, free=6),
    ]
    found = RunFigures.from_record(replace(record(), pool=told)).pool
    assert (found.rt, found.be, found.shared, found.idle, found.leased) == (8 / 40, 2 / 40, 2 / 40, 8 / 40, 4 / 40)


def test_a_run_in_which_nothing_happened_has_figures() -> None:
    found = RunFigures.from_record(replace(record(), ended_at=0.0, wall_s=0.0))
    assert found.requests.count == 0
    assert all(isnan(found.at(path)) for path in ("rt.attainment", "rt.ttft_s.p99", "be.tokens_per_s", "tokens_per_s"))
    assert figure_tree(found)["rt"]["attainment"] is None


# --- Invariants

TIMES = st.lists(st.floats(0, 20, allow_nan=False), max_size=6).map(sorted)


@st.composite
def some_requests(draw: st.DrawFn) -> list[RequestRecord]:
    found = []
    for number, (times, outcome) in enumerate(
        draw(st.lists(st.tuples(TIMES, st.sampled_from(RequestOutcome)), max_size=8))
    ):
        ended = outcome is RequestOutcome.FINISHED and not times
        found.append(rt(str(number), 0.0, *times, outcome=RequestOutcome.REFUSED if ended else outcome))
    return found


@settings(max_examples=examples(50), deadline=None)
@given(some_requests(), st.randoms(use_true_random=False))
def test_shares_are_shares_and_no_order_matters(requests: list[RequestRecord], draw: Random) -> None:
    found = figure_tree(RunFigures.from_record(record(requests)))
    for share in _shares(found):
        assert share is None or 0 <= share <= 1
    shuffled = draw.sample(requests, len(requests))
    assert figure_tree(RunFigures.from_record(record(shuffled))) == found


def _shares(tree: dict[str, Any]) -> list[float | None]:
    rt_tree, papers = tree["rt"], tree["papers"]
    return [
        *(rt_tree[name] for name in ("attainment", "ttft_attainment", "tbt_attainment", "tokens_in_time")),
        *(papers["accelgen"][name] for name in ("steps_in_slo", "jct_attainment")),
        *(papers["bros"][name] for name in ("ttft_attainment", "tpot_attainment", "attainment")),
    ]


@settings(max_examples=examples(50), deadline=None)
@given(some_requests())
def test_a_further_refused_request_lowers_attainment(requests: list[RequestRecord]) -> None:
    before = RunFigures.from_record(record(requests)).rt
    after = RunFigures.from_record(record([*requests, rt("refused", 0.0, outcome=RequestOutcome.REFUSED)])).rt
    assert after.attainment <= (before.attainment if requests else 1)
    assert after.tokens_in_time <= (before.tokens_in_time if requests else 1)
