"""What a policy means for memory, and which options go together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.papers.names import SchedulerName
from alignedserve.papers.policy import PaperPolicy
from alignedserve.papers.rules import RULES
from alignedserve.scheduling.policy import DEFAULT_POLICY, Chunking, Policy, Room


@pytest.mark.parametrize(
    ("policy", "drops"),
    [
        (DEFAULT_POLICY, True),
        (Policy(room=Room.WHOLE), False),
        (Policy(chunking=Chunking.NONE), False),
        (Policy(room=Room.GROWING), True),
        (Policy(room=Room.GROWING, memory="two_ended"), False),
        (Policy(room=Room.GROWING, memory="hybrid"), False),
    ],
)
def test_what_no_layer_reads_is_given_back_where_each_request_gets_blocks_of_its_own_as_it_runs(
    policy: Policy, drops: bool
) -> None:
    assert policy.drops is drops


@pytest.mark.parametrize(
    ("policy", "keeps_hidden", "keeps_apart"),
    [
        (DEFAULT_POLICY, False, True),
        (Policy(room=Room.GROWING, memory="two_ended"), False, False),
        (Policy(room=Room.GROWING, memory="hybrid"), True, False),
    ],
)
def test_what_a_block_may_hold(policy: Policy, keeps_hidden: bool, keeps_apart: bool) -> None:
    assert (policy.block_use.keeps_hidden, policy.block_use.keeps_apart) == (keeps_hidden, keeps_apart)


def test_each_scheduler_has_rules_and_goes_with_some_options() -> None:
    assert {*RULES, SchedulerName.ALIGNED} == set(SchedulerName)
    policies = (
        Policy(name, chunking, room, memory=memory)
        for name in SchedulerName
        for chunking in Chunking
        for room in Room
        for memory in ("plain", "weighed")
    )
    assert {policy.scheduler for policy in policies if policy.problem is None} == set(SchedulerName)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (Policy(room=Room.GROWING, memory="two_ended"), {"room": Room.WHOLE}),
        (Policy(memory="hybrid"), {"room": Room.CHUNKS, "scheduler": SchedulerName.SHORTEST}),
        (Policy(room=Room.CHUNKS), {"chunking": Chunking.NONE, "reserve": 1}),
        (PaperPolicy(SchedulerName.TGI, Chunking.NONE, waiting_ratio=1.2), {"scheduler": SchedulerName.FCFS}),
        (Policy(SchedulerName.ALISE), {"memory": "two_ended"}),
        (Policy(SchedulerName.MLFQ, Chunking.FIXED), {"chunking": Chunking.SLO}),
    ],
)
def test_options_that_mean_nothing_together(policy: Policy, options: dict[str, Any]) -> None:
    assert policy.problem is None
    for option, value in options.items():
        assert replace(policy, **{option: value}).problem is not None
