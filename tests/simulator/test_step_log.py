"""Steps that are kept packed read as they were recorded."""

from __future__ import annotations

from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import NO_KV, Chunk, Decode, Sampling, StepPlan
from alignedserve.cost.model import shape_of
from alignedserve.lab.loads.records.records import StepRecord
from alignedserve.lab.simulator.recorder import StepLog

BUDGET = 512
NAMES, SIZES, TIMES = st.sampled_from(["a", "b", "c"]), st.integers(0, 100_000), st.floats(0.001, 1e6)
CHUNKS = st.builds(
    lambda name, length, start, is_last: Chunk(name, (1,) * length, start, NO_KV, Sampling() if is_last else None),
    *(NAMES, st.integers(1, 20), SIZES, st.booleans()),
)
DECODES = st.builds(lambda name, start: Decode(name, 1, start, NO_KV, Sampling(), 1), NAMES, SIZES)
PLANS = st.builds(
    lambda chunks, decodes, seconds: StepPlan(1, tuple(chunks), tuple(decodes), seconds),
    *(st.lists(CHUNKS, max_size=3), st.lists(DECODES, max_size=5), TIMES),
)
STEPS = st.lists(st.tuples(st.sampled_from(["decode-0", "decode-1"]), TIMES, TIMES, st.floats(0, 1), PLANS))


@given(STEPS)
def test_they_read_as_they_were_noted(steps: list[tuple[str, float, float, float, StepPlan]]) -> None:
    log, wanted = StepLog(BUDGET), list[StepRecord]()
    for worker, began_at, seconds, free_share, plan in steps:
        log.add(worker, began_at, seconds, free_share, plan)
        emitted = [chunk.request for chunk in plan.chunks if chunk.sampling] + [
            decode.request for decode in plan.decodes
        ]
        shortest = min((decode.start for decode in plan.decodes), default=0)
        told = (worker, began_at, seconds, plan.predicted_s, shape_of(plan), shortest, BUDGET, free_share)
        wanted.append(StepRecord(*told, emitted=tuple(emitted)))
    assert list(log) == wanted
    assert (len(log), log[:2], log[1:]) == (len(wanted), wanted[:2], wanted[1:])
    assert [log[at] for at in range(len(wanted))] == wanted


def test_a_step_that_nobody_predicted_has_no_prediction() -> None:
    log = StepLog(BUDGET)
    log.add("decode-0", 0.0, 1.0, 1.0, StepPlan(1, decodes=(Decode("a", 1, 5, NO_KV, Sampling(), 1),)))
    assert [log[-1].predicted_s] == pytest.approx([nan], nan_ok=True)
