"""The rules of the default scheduler that lab/benchmarks/rules.py leaves out one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.cost.model import Coefficients, CostModel, Kind, Uncertainty, length_of
from alignedserve.lab.benchmarks.common.machines import MACHINES, save_profile
from alignedserve.lab.benchmarks.common.simulating import save_load
from alignedserve.lab.benchmarks.rules import DOCUMENTS, RULES, outcome, without
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import StepTimes
from alignedserve.worker.step.context import StepContext


@pytest.mark.parametrize("name", RULES)
def test_the_function_of_a_rule_is_replaced_for_a_while(name: str) -> None:
    owner, attribute, _ = RULES[name]
    before = getattr(owner, attribute)
    with without(RULES[name]):
        assert getattr(owner, attribute) is not before
    assert getattr(owner, attribute) is before


def test_each_rule_without_a_say_takes_what_the_rule_takes(tmp_path: Path) -> None:
    chats = {"name": "chats", "prompt": "32-256", "output": "4-8", "num_requests": 1000, "rate": 4.0}
    chats |= {"ttft_s": 0.3, "tbt_s": 0.06}
    path = save_load(tmp_path / "load.yaml", 3, chats, {**DOCUMENTS, "prompt": "512-1024", "output": "4-16"})
    save_profile(tmp_path / "cpu.json", MACHINES["zen4"])
    trial = SimulationTrial("aligned", path, "2xcolocated", 0, None, str(tmp_path / "cpu.json"))
    found = outcome(tuple(RULES), trial, None)
    assert {"caution", "budget", "chats to come"} <= found.said
    assert all(found.columns[name] for name in ("attained", "documents", "latency_ms", "first_p95_ms", "gap_p99_ms"))
    alone = outcome((), trial, "caution")
    assert not alone.said
    assert alone.columns != found.columns


def test_without_caution_a_step_fills_its_bound() -> None:
    cost = CostModel(
        dict.fromkeys(Kind, Coefficients()), dict.fromkeys(Kind, Uncertainty(tails={length_of(0.075): 0.5}))
    )
    at = StepContext(0.0, cost, StepTimes(), 512, 16, 64, Policy(), 64)
    assert at.careful_s(0.09) == pytest.approx(0.06)
    with without(RULES["caution"]):
        assert (at.careful_s(0.09), at.careful_s(0.09, Kind.DECODE)) == (0.09, 0.09)
