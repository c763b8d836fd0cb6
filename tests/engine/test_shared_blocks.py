"""Tests of chats and other requests on a device that is far too small for them: each says what it says alone.

Real cores, real engines and a real arena, in one process. Chats take slots of best-effort requests, which wait, get
them back and go on; the tests assert that all of that happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.lab.fuzzing.worker_views import slots_of
from alignedserve.papers.names import SchedulerName
from alignedserve.scheduling.policy import Chunking, Policy, Room
from tests.engine.deployment import Deployment, asked, deployed
from tests.reference import Tally, compare

SHARED = Policy(room=Room.GROWING, memory="two_ended")
LITTLE_KEPT = replace(SHARED, memory="two_ended:0.2")
FCFS = replace(SHARED, scheduler=SchedulerName.FCFS, chunking=Chunking.FIXED)


@pytest.fixture
def deployment(folder: Path, topology: str, policy: Policy, tmp_path: Path) -> Iterator[Deployment]:
    with deployed(folder, topology, policy, tmp_path) as made:
        yield made


@pytest.fixture
def folder(folder_of: Callable[[str], Path], name: str) -> Path:
    return folder_of(name)


# The seeds are chosen so that every kind of event happens.
@pytest.mark.parametrize(
    ("topology", "policy", "name", "seed"),
    [
        ("colocated", SHARED, "gqa-untied", 1),
        ("colocated", LITTLE_KEPT, "opt", 14),
        ("colocated", FCFS, "gqa-untied", 13),
        ("1+1", SHARED, "gqa-untied", 3),
        ("1+1", LITTLE_KEPT, "opt", 0),
    ],
)
def test_what_they_say_is_what_they_say_alone(
    deployment: Deployment, folder: Path, reference_of: Callable[[Path], Any], topology: str, policy: Policy, seed: int
) -> None:
    tally = Tally()
    for request in asked(deployment, seed):
        assert len(deployment.outputs[request.id]) == request.max_tokens
        compare(reference_of(folder), request.prompt, deployment.outputs[request.id], tally, f"{folder.name}, {policy}")
    tally.check()
    held = deployment.decodes.held
    assert (held["requests"], held["blocks"], held["pages"]) == (0, 0, 0)
    shared = slots_of(deployment.decodes.memory)
    assert shared is not None
    assert not shared.cuts
    assert set(deployment.slot_copies) == {"checkpoint", "restored", "moved"}
    assert deployment.num_without_slots or topology == "colocated"
