"""Tests of a deployment with random weights: a folder with a config.json is enough, and all workers have the same
model, also when they have come back."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.end_to_end.client import Wanted, all_tokens, mixed
from tests.end_to_end.deployment import BACK_S, MODEL, Deployment, deployed, wait_until
from tests.rare import rare

pytestmark = rare  # tests/engine/test_dummy.py has such models without servers

WORKERS = ("decode-0", "decode-1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that has a larger vocabulary than the demo model, and nothing but its shapes."""
    folder = tmp_path_factory.mktemp("shapes")
    shapes = json.loads((MODEL / "config.json").read_text())
    shapes |= {"vocab_size": 5000, "num_hidden_layers": 3, "tie_word_embeddings": False, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(shapes))
    return folder


@pytest.fixture(scope="module")
def random_weights(folder: Path) -> Iterator[Deployment]:
    cache = folder / "cache"
    flags = ("--load-format", "dummy", "--served-model-name", "demo", "--cache-directory", str(cache))
    with deployed(*flags, "--log-level", "debug", topology="2xcolocated", model=folder) as deployment:
        yield deployment
    shutil.rmtree(cache)


def asked() -> list[Wanted]:
    """Return the same three requests many times, so that each worker has all of them."""
    few = [replace(wanted, ignore_eos=True, logprobs=False) for wanted in mixed(3, seed=8, outputs=(30, 40))]
    return few * 4


def answers(deployment: Deployment) -> list[list[int]]:
    found = asyncio.run(all_tokens(deployment.url, asked()))
    assert found[:3] * 4 == found, "two workers have different weights"
    return found[:3]


def ended_on(deployment: Deployment, worker: str) -> int:
    return deployment.whole_log().count(f"{worker}: ended request_id")


def test_workers_and_starts_have_one_model(random_weights: Deployment) -> None:
    before = answers(random_weights)
    assert len({tuple(tokens) for tokens in before}) == 3, "the answers depend on the prompts"

    def both_have_answered() -> bool:  # one may come a moment after the other
        return answers(random_weights) == before and all(ended_on(random_weights, worker) for worker in WORKERS)

    wait_until(both_have_answered, BACK_S, random_weights.log)
    for worker in WORKERS:
        random_weights.wound(worker)
    wait_until(lambda: random_weights.is_ready, BACK_S, random_weights.log)
    assert answers(random_weights) == before


def test_it_says_that_answers_are_nonsense(random_weights: Deployment) -> None:
    models = random_weights.ask("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["demo"]
    assert "weights are random (engine.load_format dummy): answers are nonsense" in random_weights.whole_log()
    assert "has no tokenizer, so tokens are spelled by the demo model's" in random_weights.whole_log()
