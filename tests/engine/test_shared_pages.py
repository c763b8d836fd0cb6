"""Tests of requests that begin alike and share pages of the device: each says what it says alone.

Real cores, real engines and a real arena, in one process. The device is too small for all of them, so pages that are
kept for later are evicted, and requests have to leave and come back to what is left of their pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from alignedserve.core import Request, ServiceClass
from alignedserve.lab.fuzzing.worker_views import num_preemptions
from alignedserve.scheduling.policy import Policy, Room
from tests.engine.deployment import Deployment, deployed
from tests.engine.driver import prompt_of
from tests.reference import Tally, compare
from tests.samples import request

GROWING = Policy(room=Room.GROWING)
CHUNKS = Policy(room=Room.CHUNKS)
SYSTEM = prompt_of(1000, 17)  # with which all conversations begin: two pages, and a token


@pytest.mark.parametrize(
    ("topology", "policy", "look_ahead"),
    [
        ("colocated", Policy(), 0),
        ("colocated", GROWING, 0),
        ("colocated", GROWING, 1),
        ("colocated", CHUNKS, 0),
        ("1+1", GROWING, 0),
    ],
)
def test_what_they_say_is_what_they_say_alone(
    folder_of: Callable[[str], Path],
    reference_of: Callable[[Path], Any],
    tmp_path: Path,
    topology: str,
    policy: Policy,
    look_ahead: int,
) -> None:
    folder, tally = folder_of("gqa-untied"), Tally()
    with deployed(folder, topology, policy, tmp_path, look_ahead=look_ahead) as deployment:
        for said in conversations(deployment):
            compare(reference_of(folder), said.prompt, deployment.outputs[said.id], tally, f"{topology}, {policy}")
        tally.check()
        first = deployment.cores["prefill-0" if topology == "1+1" else "decode-0"]
        assert first.memory.pages.num_shared_tokens > 100
        assert deployment.decodes.held["blocks"] == first.held["blocks"] == 0
        if policy is GROWING and topology == "colocated":
            assert num_preemptions(deployment.decodes)


def conversations(deployment: Deployment) -> list[Request]:
    """Hold four conversations of three turns at once, and return all requests."""
    random, said, texts = Random(3), list[Request](), [SYSTEM] * 4
    for turn in range(3):
        for number, text in enumerate(texts):
            asked = request(f"r{number}-{turn}", max_tokens=random.randint(4, 9))
            prompt = (*text, *prompt_of(10 * turn + number, random.randint(1, 5)))
            service = ServiceClass.RT if number % 2 else ServiceClass.BE
            said.append(replace(asked, prompt=prompt, stop_tokens=(), service=service, arrival_at=deployment.now))
            deployment.asks(said[-1])
            deployment.works(random.randint(0, 2))
        deployment.works(500)
        assert deployment.is_idle
        texts = [(*asked.prompt, *deployment.outputs[asked.id]) for asked in said[-4:]]
    return said
