"""Which scheduler a preset means, and what a prefill worker runs where classes take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.config.config import of_preset
from alignedserve.schedulers.scheduler import SchedulerSetup
from alignedserve.schedulers.table import scheduler_of
from alignedserve.scheduling.policy import Chunking, Order, Packing, Policy
from alignedserve.worker.step.view import StepView
from tests.worker.step.test_selection import chat, document, moment, ran, seating, waits

ROUND = Policy(order=Order.FCFS, chunking=Chunking.FIXED, packing=Packing.ROUND_ROBIN)


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("aligned", "Aligned"),
        ("aligned-multi-resource", "BestFit"),
        ("bros", "Aligned"),
        ("shortest", "InOrder"),
        ("accelgen", "AccelGen"),
        ("accelgen-no-chunk", "WholeAccelGen"),
        ("alise", "Alise"),
        ("alise-defer", "InOrder"),
        ("sarathi", "FirstCome"),
        ("alignedserve-paper", "LongestLeaves"),
        ("tgi", "Tgi"),
        ("round-robin", "RoundRobin"),
        ("mlfq", "Mlfq"),
        ("fastserve", "FastServe"),
        ("apt-serve", "AptServe"),
    ],
)
def test_each_preset_has_its_scheduler(preset: str, name: str) -> None:
    assert type(scheduler_of(SchedulerSetup(of_preset(preset, {}).policy, 8))).__name__ == name


@pytest.mark.parametrize(("is_prefill", "expected"), [(False, [("a", 64)]), (True, [("a", 64), ("b", 64)])])
def test_classes_take_turns_where_decodes_run_only(is_prefill: bool, expected: list[tuple[str, int]]) -> None:
    at = moment(ROUND)
    prompts = [chat("a", 1.0), document("b")]
    for prompt in prompts:
        prompt.pairs = (0, 1, 2, 3)
    scheduler = scheduler_of(SchedulerSetup(ROUND, 8), is_prefill)
    assert ran(scheduler.plan(StepView((), prompts, waits((), at), at, seating(0, at)))) == expected


def test_a_policy_by_arrival_needs_no_packing_of_its_own() -> None:
    policy = replace(ROUND, packing=Packing.RT_BE)
    assert type(scheduler_of(SchedulerSetup(policy, 8))).__name__ == "FirstCome"
