"""Tests of random deployments whose decode steps are captured: each request says what it says alone.

Real cores, real engines and a real arena, in one process; a captured step is a plain call (driver.py). Requests share
beginnings, so that a step names more blocks than the device has; some come while others are decoded, some have to
leave, and steps are planned ahead or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from alignedserve.core import Request, ServiceClass
from alignedserve.kernels.common.spans import QuerySpan, StaticSpans
from alignedserve.scheduling.policy import Policy, Room
from tests.conftest import SOAK
from tests.engine.deployment import BLOCK, BLOCKS, LIMITS, Deployment, deployed
from tests.engine.driver import Replays, prompt_of
from tests.reference import Tally, compare
from tests.samples import request

POLICIES = (Policy(), Policy(room=Room.GROWING), Policy(room=Room.CHUNKS), Policy(candidate_share=1.0))


def test_what_they_say_is_what_they_say_alone(
    folder_of: Callable[[str], Path],
    reference_of: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tally, most_named, place = Tally(), [0], StaticSpans.place

    def noting(spans: StaticSpans, lies: Sequence[QuerySpan]) -> None:
        most_named.append(max(most_named[-1], sum(-(-lie.tokens // BLOCK) for lie in lies)))
        place(spans, lies)

    monkeypatch.setattr(StaticSpans, "place", noting)
    for seed in range(300 if SOAK else 3):
        random, replays = Random(seed), Replays()
        folder, policy = folder_of(random.choice(("gqa-untied", "qwen2", "opt"))), random.choice(POLICIES)
        topology, directory = random.choice(("colocated", "1+1")), tmp_path / str(seed)
        directory.mkdir()
        with deployed(folder, topology, policy, directory, look_ahead=seed % 2, capture=replays) as deployment:
            for said in some_of_one_beginning(deployment, random):
                where = f"seed {seed}, {folder.name}, {topology}, {policy}"
                compare(reference_of(folder), said.prompt, deployment.outputs[said.id], tally, where)
            assert deployment.decodes.held["blocks"] == 0
        assert len({*replays.sizes}) > 1
    tally.check()
    assert most_named[-1] > BLOCKS + LIMITS.max_batch, "more than the device has, and a block for each row of padding"


def some_of_one_beginning(deployment: Deployment, random: Random) -> list[Request]:
    """Ask for requests in rows, each row over a text that the row before has read, and return all of them."""
    asked, text = list[Request](), prompt_of(random.randint(0, 999), 8 * random.randint(3, 4))
    for row in range(3):
        for number in range(random.randint(4, 6)):
            own = prompt_of(random.randint(0, 999), random.randint(1, 3))
            prompt = (*text, *own) if random.random() < 0.8 else own
            service = random.choice((ServiceClass.RT, ServiceClass.BE))
            new = request(f"r{row}-{number}", max_tokens=random.randint(2, 7))
            asked.append(replace(new, prompt=prompt, stop_tokens=(), service=service, arrival_at=deployment.now))
            deployment.asks(asked[-1])
            deployment.works(random.randint(0, 2) if row else 30)
        deployment.works(500)
        assert deployment.is_idle
    return asked
