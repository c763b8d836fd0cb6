"""Tests of deployments that are started as a user does, without sizes."""

from __future__ import annotations

import re
from pathlib import Path

from alignedserve.sizing.claims import claimed
from tests.end_to_end.deployment import Deployment, deployed, shared_memory
from tests.rare import rare
from tests.sizing.published import write

MIB = 1 << 20


def sizes(deployment: Deployment) -> dict[str, int]:
    """Return the first number of each line about a size."""
    lines = re.findall(r"^alignedserve: (context|kv|pool): ([\d,]+) ", deployment.whole_log(), re.MULTILINE)
    return {name: int(number.replace(",", "")) for name, number in lines}


def context(deployment: Deployment) -> int:
    return int(deployment.ask("/v1/models").json()["data"][0]["max_model_len"])


def test_sizes_are_told_and_the_next_deployment_counts_them() -> None:
    with shared_memory() as memory:
        with deployed(is_sized=False, topology="1+1", memory=memory) as first:
            told = sizes(first)
            assert told["context"] == context(first) == 2048, "all that the model has"
            assert claimed(memory) < (2 * told["kv"] + 600) * MIB, "what workers have taken does not count twice"
            assert claimed(memory) > 0
        assert claimed(memory) == 0


@rare  # it takes 7 GB of memory; tests/sizing has the plans of fifteen models
def test_a_model_of_3b_starts_without_flags(tmp_path: Path) -> None:
    folder = write("Llama-3.2-3B", tmp_path)
    flags = ("--load-format", "dummy", "--dtype", "auto")
    with deployed(*flags, is_sized=False, model=folder) as deployment:
        told = sizes(deployment)
        assert 4096 <= told["context"] <= 131_072
        assert told["context"] == context(deployment)
        assert deployment.metric("num_requests_open") == 0
