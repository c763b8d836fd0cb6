"""What a machine can promise: human numbers, none below the usual ones, longer on a slower machine, and kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Slo, WorkerLimits
from alignedserve.cost.model import Coefficients, CostModel, Kind, Shape, Uncertainty
from alignedserve.cost.promising import SETTLED_S, TBTS_S, TTFTS_S, LearntPromise, machine_promise, slowest

USUAL = Slo(1.0, 0.1875, is_asked=False)
LIMITS = WorkerLimits(num_blocks=2000, block_size=16, page_size=64, max_step_tokens=512, max_batch=16)
LONGEST = 8192


def machine(fixed: float, token: float, p90: float = 0.1, decode: float = 1e-3, prefix: float = 1e-6) -> CostModel:
    steps = Coefficients(fixed, (token,), work=1e-9, decode=decode, prefix=prefix)
    return CostModel(dict.fromkeys(Kind, steps), dict.fromkeys(Kind, Uncertainty(p90 / 2, p90)))


def slower(model: CostModel, by: float) -> CostModel:
    return replace(model, coefficients={kind: of.scaled(by, by) for kind, of in model.coefficients.items()})


@pytest.mark.parametrize(
    ("model", "promise"),
    [
        (machine(0.006, 2e-5), USUAL),  # a GPU
        (machine(0.0095, 1.6e-4), USUAL),  # 160 M on two cores
        (machine(0.05, 6e-3, decode=0.0), Slo(10.0, 1.0, is_asked=False)),  # 1.5 B on two cores
        (CostModel(dict.fromkeys(Kind, Coefficients())), USUAL),  # it knows no times
    ],
    ids=["gpu", "small", "large", "unknown"],
)
def test_what_machines_promise(model: CostModel, promise: Slo) -> None:
    assert machine_promise(model, LIMITS, LONGEST) == promise


seconds = st.floats(1e-6, 1.0)
machines = st.builds(machine, seconds, seconds, st.floats(0.0, 3.0), seconds, st.floats(0.0, 1e-4))
limits = st.builds(
    WorkerLimits, st.integers(4, 4000), st.just(16), st.just(64), st.integers(1, 4096), st.integers(1, 256)
)


@given(machines, limits, st.integers(2, 40_000), st.floats(1.0, 50.0))
def test_human_numbers_that_grow_as_the_machine_slows(
    model: CostModel, limits: WorkerLimits, longest: int, by: float
) -> None:
    fast, slow = machine_promise(model, limits, longest), machine_promise(slower(model, by), limits, longest)
    for slo in (fast, slow):
        assert slo.ttft_s in TTFTS_S
        assert slo.tbt_s in TBTS_S
        assert not slo.is_asked
    assert fast.ttft_s <= slow.ttft_s
    assert fast.tbt_s <= slow.tbt_s


@given(st.floats(1e-3, 0.3), st.floats(1e-5, 1e-2))
def test_steps_within_the_gap_leave_room_for_prompts(fixed: float, token: float) -> None:
    """A step as long as the gap runs prompts at four fifths of their best pace beside seven decodes."""
    model, beside = machine(fixed, token), [1000] * 7
    promise = machine_promise(model, LIMITS, LONGEST)
    if promise.tbt_s == TBTS_S[-1]:
        return  # beyond all human numbers

    def rate(tokens: int) -> float:
        return tokens / model.seconds(Shape.build([(tokens, 0)], beside))

    sizes = range(1, LIMITS.max_step_tokens - 7)
    fitting = max(tokens for tokens in sizes if tokens / rate(tokens) <= promise.tbt_s)
    assert rate(fitting) >= 0.8 * max(map(rate, sizes))
    alone_s = model.seconds(Shape.build([(1000, 0)]))
    assert promise.ttft_s > alone_s or promise.ttft_s == TTFTS_S[-1]


def test_all_workers_keep_the_slowest_promise() -> None:
    assert slowest([]) is None
    assert slowest([Slo(2.0, 0.25), Slo(1.0, 0.5)]) == Slo(2.0, 0.5, is_asked=False)


def test_a_promise_changes_only_when_the_machine_has_long_been_another() -> None:
    quick, slow = machine(0.0095, 1.6e-4), machine(0.1, 6e-3)
    learnt = LearntPromise(LIMITS, LONGEST)
    assert learnt.told(quick, 0.0) == USUAL
    busy = [learnt.told(slow if now % 60 < 50 else quick, now) for now in range(10, 600, 10)]
    assert set(busy) == {USUAL}, "it is quick again each minute"
    since = 600.0
    late = {now: learnt.told(slow, now) for now in (since, since + SETTLED_S - 10, since + SETTLED_S)}
    assert [*late.values()] == [USUAL, USUAL, machine_promise(slow, LIMITS, LONGEST)]
