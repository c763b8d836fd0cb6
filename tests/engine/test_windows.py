"""Tests that the answer is that of transformers where all layers have a window, and requests drop what none reads.

Real cores, real engines, a real arena. The device holds 56 tokens, and the requests are longer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from alignedserve.architectures.config import ModelConfig
from alignedserve.architectures.families.model_config import read_config
from alignedserve.core import Chunk, KvForm, Request, Sampling, ServiceClass, StepPlan
from alignedserve.engine.engine import Engine
from alignedserve.errors import PlanError, UnsupportedModel
from alignedserve.lab.fuzzing.worker_views import num_preemptions
from alignedserve.scheduling.policy import Policy
from tests.engine.deployment import BLOCK, BLOCKS, LIMITS, PAGE, Deployment, deployed
from tests.engine.driver import prompt_of
from tests.engine.transformers_families import FULL, SLIDING, make
from tests.models import MAX_POSITIONS, mistral, qwen2
from tests.rare import rarely
from tests.reference import Tally, compare, load
from tests.samples import request

REACH = 12
CHATS = Policy()
NOTHING_SHARED = replace(CHATS, reuse=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mistral(tmp_path_factory.mktemp("windowed"), sliding_window=REACH)


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("by-transformers"), "starcoder2", sliding_window=REACH)


@pytest.mark.parametrize(
    ("topology", "policy", "direct", "look_ahead"),
    [
        rarely(("colocated", CHATS, False, 0)),
        ("colocated", CHATS, False, 1),
        rarely(("colocated", NOTHING_SHARED, False, 0)),
        ("1+1", CHATS, False, 0),
        rarely(("1+1", CHATS, True, 0)),
        ("1+1", NOTHING_SHARED, True, 1),
    ],
)
def test_long_requests_are_answered_right_on_a_small_device(
    folder: Path, tmp_path: Path, topology: str, policy: Policy, direct: bool, look_ahead: int
) -> None:
    with deployed(
        folder, topology, policy, tmp_path, direct=direct, look_ahead=look_ahead, prefill_blocks=20, reach=REACH
    ) as deployment:
        requests = asked(deployment)
        assert num_preemptions(deployment.decodes), "requests left, and came back"
        assert deployment.decodes.held["blocks"] == 0
    assert max(each.most_tokens for each in requests) > 2 * LIMITS.num_tokens
    check_outputs(deployment, requests, folder)


@pytest.mark.parametrize("topology", ["colocated", rarely("1+1")])
def test_a_model_that_transformers_runs_is_answered_right(by_transformers: Path, tmp_path: Path, topology: str) -> None:
    reach = read_config(by_transformers).reach
    with deployed(by_transformers, topology, CHATS, tmp_path, prefill_blocks=20, reach=reach) as deployment:
        requests = asked(deployment)
        assert num_preemptions(deployment.decodes)
    check_outputs(deployment, requests, by_transformers)


def check_outputs(deployment: Deployment, requests: Sequence[Request], folder: Path) -> None:
    tally, reference = Tally(), load(folder)
    for each in requests:
        served = deployment.outputs[each.id]
        assert len(served) == each.max_tokens
        compare(reference, each.prompt, served, tally, each.id)
    tally.check()


def test_a_decode_holds_its_window_and_no_more(folder: Path, tmp_path: Path) -> None:
    with deployed(folder, "colocated", CHATS, tmp_path, reach=REACH) as deployment:
        long = replace(request("long", max_tokens=100), prompt=prompt_of(5, 50), stop_tokens=())
        deployment.asks(long)
        held, free = list[int](), list[int]()
        while not deployment.is_idle:
            deployment.works(1)
            held += [running.num_held for running in deployment.decodes.here.residents.values()]
            free.append(deployment.decodes.memory.num_free)
        assert len(deployment.outputs["long"]) == 100
    assert max(held) < REACH + PAGE
    assert min(free) >= BLOCKS - (32 + REACH + PAGE) // BLOCK, "the prompt ran in chunks of at most 32"


def test_requests_with_a_beginning_in_common_are_answered_right(folder: Path, tmp_path: Path) -> None:
    common = prompt_of(1, 30)
    asks = [
        replace(request(f"r{number}", max_tokens=20), prompt=(*common, *prompt_of(number, 5 * number)), stop_tokens=())
        for number in range(6)
    ]
    with deployed(folder, "colocated", CHATS, tmp_path, reach=REACH) as deployment:
        for each in asks:
            deployment.asks(each)
            deployment.works(10)
        deployment.works(600)
        assert deployment.is_idle
        assert deployment.decodes.memory.pages.num_shared_tokens > 0
    tally, reference = Tally(), load(folder)
    for each in asks:
        compare(reference, each.prompt, deployment.outputs[each.id], tally, each.id)
    tally.check()


def asked(deployment: Deployment) -> list[Request]:
    """Send requests of all lengths, some of them chats, and return them when all have ended."""
    random, asked = Random(7), list[Request]()
    for number in range(10):
        service = ServiceClass.RT if number % 3 == 2 else ServiceClass.BE
        length = random.choice((3, 30, 100, 118))
        new = replace(request(f"r{number}", max_tokens=random.randint(4, 40)), prompt=prompt_of(number, length))
        asked.append(replace(new, stop_tokens=(), service=service, arrival_at=deployment.now))
        deployment.asks(asked[-1])
        deployment.works(random.randint(0, 6))
    deployment.works(3000)
    assert deployment.is_idle
    return asked


@pytest.mark.parametrize(
    ("make", "reach"),
    [
        (lambda folder: mistral(folder, sliding_window=9), 9),
        (lambda folder: mistral(folder, sliding_window=None), None),
        (lambda folder: qwen2(folder, max_window_layers=0, layer_types=None), 24),
        (qwen2, None),  # its first layer reads all
    ],
)
def test_a_model_reaches_as_far_as_its_layer_that_sees_most(
    tmp_path: Path, make: Callable[[Path], Path], reach: int | None
) -> None:
    config: ModelConfig = read_config(make(tmp_path))
    assert config.reach == reach


@pytest.mark.parametrize(
    ("family", "special", "reach"),
    [
        ("starcoder2", {"sliding_window": None}, None),
        ("starcoder2", {"sliding_window": MAX_POSITIONS}, None),
        ("phi3", {"sliding_window": 9}, 9),
        ("starcoder2", {"sliding_window": 9}, 9),
        ("gemma2", {"sliding_window": 9, "layer_types": [SLIDING, SLIDING]}, 9),
        ("gemma2", {"sliding_window": 9, "layer_types": [SLIDING, FULL]}, None),
    ],
)
def test_how_far_transformers_reads_is_known_before_it_loads_the_model(
    tmp_path: Path, family: str, special: dict[str, Any], reach: int | None
) -> None:
    folder = make(tmp_path, family, **special)
    assert read_config(folder).reach == reach
    assert Engine(folder, num_blocks=1, dtype="float32").config.reach == reach


def test_a_window_that_no_layer_has_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, "granite")
    config = json.loads((folder / "config.json").read_text())
    config |= {"sliding_window": 9, "layer_types": [SLIDING, SLIDING]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"reads more than the last 9 tokens.*set it to null$"):
        Engine(folder, num_blocks=1, dtype="float32")


def test_the_engine_refuses_a_step_that_lacks_tokens_which_are_read(folder: Path) -> None:
    engine = Engine(folder, num_blocks=8, block_size=4, dtype="float32")
    good = Chunk("r", (5,), 20, KvForm((1, 2, 3, 4), 8), Sampling())
    engine.step(StepPlan(1, (good,)))
    for wrong in (replace(good, kv=KvForm((1, 2, 3, 4), dropped)) for dropped in (12, 6, -4)):
        with pytest.raises(PlanError, match="lacks its first"):
            engine.step(StepPlan(2, (wrong,)))
