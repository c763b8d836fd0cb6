"""Tests of the engine with KV in int8: greedy output equals that of transformers whose K and V are rounded as they are
written, however a request was cut, moved and preempted. The levels are never rounded again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.core import StepPlan
from alignedserve.cost.model import Route
from alignedserve.engine.engine import Engine
from alignedserve.engine.profiling import Meter, measure_copies, measure_remaking, subject_of
from alignedserve.errors import PlanError
from alignedserve.kernels.common.int8_kv import dequantise_vectors, quantise_vectors
from alignedserve.scheduling.policy import Policy, Room
from tests.engine.deployment import asked, deployed
from tests.engine.driver import Driver, prompt_of
from tests.engine.test_pressure import happened
from tests.engine.transformers_families import make
from tests.reference import Tally, compare

FolderOf = Callable[[str], Path]
PLAIN = Policy(room=Room.GROWING)
SHARED = Policy(room=Room.GROWING, memory="two_ended:0.2")
PREFILL_BLOCKS = 26


class Rounding:
    """A model of transformers whose K and V are rounded to int8 on their way into its cache."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        from transformers import DynamicCache

        class RoundingCache(DynamicCache):
            def update(self, key: torch.Tensor, value: torch.Tensor, *where: Any, **more: Any) -> Any:
                return super().update(rounded(key), rounded(value), *where, **more)

        return self._model(input_ids=input_ids, past_key_values=RoundingCache(), use_cache=True)


def rounded(heads: torch.Tensor) -> torch.Tensor:
    """Return [1, heads, tokens, head_dim] as int8 keeps them."""
    vectors = heads[0].transpose(0, 1).flatten(1)
    back = dequantise_vectors(quantise_vectors(vectors, heads.shape[1]), heads.shape[-1])
    return back.transpose(0, 1)[None]


@pytest.mark.parametrize("name", ["gqa-untied", "opt", "mistral", "qwen3", "gpt2"])
def test_any_chunking_and_either_end(
    name: str, folder_of: FolderOf, reference_of: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Models of our own modules, one with a window, and one that transformers runs."""
    folder, tally = make(tmp_path / name, name) if name == "gpt2" else folder_of(name), Tally()
    for block_size, sizes in ((16, ()), (4, (7, 1, 20))):
        engine = Engine(
            folder, num_blocks=480 // block_size, block_size=block_size, dtype="float32", kv_dtype=KvDtype.INT8
        )
        driver = Driver(engine, 1)
        lives = [driver.start_either_way(f"r{seed}", prompt_of(seed, 9 + 20 * seed), 12) for seed in range(3)]
        for live in lives:
            driver.prefill(live, sizes)
        while len(lives[0].output) < 12:
            driver.run(*lives, parts=[live.decode() for live in lives])
        for live in lives:
            compare(Rounding(reference_of(folder)), live.prompt, live.output, tally, f"{name}, chunks {sizes}")
    tally.check()


def test_a_profile_is_measured_without_hidden_vectors(folder_of: FolderOf, tmp_path: Path) -> None:
    engine = Engine(folder_of("mha-tied"), num_blocks=40, block_size=4, dtype="float32", kv_dtype=KvDtype.INT8)
    assert measure_remaking(Meter(engine)) == 0.0
    links = measure_copies(Meter(engine), 8, tmp_path)
    assert set(links) == {Route.DEVICE_TO_ARENA, Route.ARENA_TO_DEVICE}
    hidden = Driver(engine, 0).start_hidden("r", prompt_of(1, 9), 1)
    with pytest.raises(PlanError, match="cannot keep hidden vectors: KV is kept in int8"):
        engine.step(StepPlan(1, (hidden.chunk(9),)))
    assert "KV int8" in subject_of(engine, folder_of("mha-tied")).dtype


# The seeds are chosen so that requests leave, and come back.
@pytest.mark.parametrize(
    ("topology", "policy", "seed", "direct"),
    [
        ("colocated", PLAIN, 2, False),
        ("colocated", SHARED, 15, False),
        ("1+1", SHARED, 1, False),
        ("1+1", PLAIN, 2, True),
    ],
)
def test_what_they_say_is_what_they_say_alone(
    topology: str,
    policy: Policy,
    seed: int,
    direct: bool,
    folder_of: FolderOf,
    reference_of: Callable[[Path], Any],
    tmp_path: Path,
) -> None:
    """Requests go to the pool, to candidate requests, to the other worker, and back: the device is small."""
    folder, tally = folder_of("gqa-untied"), Tally()
    kept = KvDtype.INT8
    with deployed(folder, topology, policy, tmp_path, None, direct, PREFILL_BLOCKS, kv_dtype=kept) as deployment:
        for request in asked(deployment, seed):
            output = deployment.outputs[request.id]
            assert len(output) == request.max_tokens
            compare(Rounding(reference_of(folder)), request.prompt, output, tally, f"{topology}, {policy}")
        tally.check()
        assert deployment.decodes.held["requests"] == 0
        wanted = {"restored"} if policy is SHARED else {"preemption", "eviction to the pool"}
        assert wanted - happened(deployment) == set()
