"""Tests of requests that are kept as KV or as hidden vectors, on a device that is far too small for them.

Each request says what it says alone. Real cores, real engines and a real arena, in one process; counters say that
evictions happened.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cost.fit import OnlineCost
from alignedserve.lab.fuzzing.worker_views import weighed
from alignedserve.papers.names import SchedulerName
from alignedserve.scheduling.policy import Chunking, Policy, Room
from tests.engine.deployment import asked, deployed
from tests.reference import Tally, compare

GROWING = Policy(room=Room.GROWING, memory="hybrid")
WHOLE = Policy(room=Room.WHOLE, memory="hybrid")
KNAPSACK = Policy(SchedulerName.APT_SERVE, Chunking.NONE, Room.GROWING, memory="hybrid")
HIDDEN_TOKEN_S = 1e-5


class Believed(OnlineCost):
    """A cost model that learns nothing, because real steps take a different time in every run."""

    def learn(self, shape: object, seconds: float) -> None: ...


# The seeds are chosen so that every kind of event happens.
@pytest.mark.parametrize(
    ("policy", "name", "seed"),
    [
        (GROWING, "opt", 1),
        (GROWING, "mha-tied", 2),
        (WHOLE, "mha-tied", 3),
        (KNAPSACK, "opt", 1),
    ],
)
def test_what_they_say_is_what_they_say_alone(
    folder_of: Callable[[str], Path],
    reference_of: Callable[[Path], Any],
    tmp_path: Path,
    policy: Policy,
    name: str,
    seed: int,
) -> None:
    folder, tally = folder_of(name), Tally()
    with deployed(folder, "colocated", policy, tmp_path, Believed((), HIDDEN_TOKEN_S)) as deployment:
        for request in asked(deployment, seed):
            assert len(deployment.outputs[request.id]) == request.max_tokens
            compare(reference_of(folder), request.prompt, deployment.outputs[request.id], tally, f"{name}, {policy}")
        tally.check()
        held, hybrid = deployment.decodes.held, weighed(deployment.decodes.memory)
        assert (held["requests"], held["blocks"], held["pages"]) == (0, 0, 0)
        assert hybrid is not None
        assert hybrid.num_hidden
        assert hybrid.num_projected
