"""Which scheduler a preset means, and what a prefill worker runs where classes take turns."""

from __future__ import annotations

import pytest

from alignedserve.config.config import load, of_preset
from alignedserve.config.scheduler_settings import PROPERTIES
from alignedserve.core import KvForm
from alignedserve.errors import ConfigError
from alignedserve.schedulers.table import SCHEDULERS, scheduler_of
from alignedserve.scheduling.policy import Chunking, Policy, SchedulerName
from alignedserve.worker.step.view import StepView
from tests.worker.step.test_selection import chat, document, moment, ran, seating, waits

ROUND = Policy(SchedulerName.ROUND_ROBIN, chunking=Chunking.FIXED)


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
        ("alise-defer", "Alise"),
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
    assert type(scheduler_of(of_preset(preset, {}).policy, 8)).__name__ == name


@pytest.mark.parametrize(("is_prefill", "expected"), [(False, [("a", 64)]), (True, [("a", 64), ("b", 64)])])
def test_classes_take_turns_where_decodes_run_only(is_prefill: bool, expected: list[tuple[str, int]]) -> None:
    at = moment(ROUND)
    prompts = [chat("a", 1.0), document("b")]
    for prompt in prompts:
        prompt.kv = KvForm((0, 1, 2, 3))
    scheduler = scheduler_of(ROUND) if is_prefill else scheduler_of(ROUND, 8)
    assert ran(scheduler.plan(StepView((), prompts, waits((), at), at, seating(0, at)))) == expected


def test_every_name_has_a_scheduler_and_can_be_said_by_its_properties() -> None:
    assert set(SCHEDULERS) == set(SchedulerName) == set(PROPERTIES)


@pytest.mark.parametrize(
    ("preset", "said", "name"),
    [
        ("aligned", {}, SchedulerName.ALIGNED),
        ("aligned", {"order": "fcfs", "packing": "fcfs"}, SchedulerName.FCFS),
        ("aligned", {"order": "slack"}, SchedulerName.BROS),
        ("aligned", {"selection": "multi_resource"}, SchedulerName.BEST_FIT),
        ("bros", {"order": "due"}, SchedulerName.ALIGNED),
        ("bros", {"as_in_paper": "true"}, SchedulerName.ACCELGEN_NO_BATCH),
        ("accelgen", {"as_in_paper": "true"}, SchedulerName.ACCELGEN),
        ("mlfq", {"packing": "skip_join"}, SchedulerName.FASTSERVE),
        ("tgi", {"order": "fcfs"}, SchedulerName.TGI),
        ("vllm-fcfs", {"waiting_ratio": "1.2"}, SchedulerName.TGI),
        ("tgi", {"scheduler": "fcfs", "waiting_ratio": "0"}, SchedulerName.FCFS),
    ],
)
def test_the_settings_before_it_had_a_name_say_a_scheduler(
    preset: str, said: dict[str, str], name: SchedulerName
) -> None:
    flags = {"preset": preset, **{f"schedule.{key}": value for key, value in said.items()}}
    assert load(flags, {}, None).policy.scheduler is name


def test_settings_that_say_no_scheduler_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no scheduler with order levels, packing rt_be, .* as_in_paper True"):
        of_preset("alise", {"schedule.as_in_paper": True})
