"""Choices of one prompt draw their first tokens together, and each says what it says alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.core import Request, Sampling
from alignedserve.scheduling.policy import Handoff, Policy, Room
from tests.engine.deployment import deployed
from tests.engine.driver import prompt_of
from tests.samples import request

PROMPT = prompt_of(7, 11)
PLAIN, WARM = Sampling(), Sampling(temperature=1.0)
ALONE = Policy(reuse=False)


def choices(sampling: Sampling, prompt: tuple[int, ...] = PROMPT) -> list[Request]:
    asked = replace(request("c", max_tokens=9), prompt=prompt, stop_tokens=())
    return [replace(asked, id=f"c{seed}", sampling=replace(sampling, seed=seed)) for seed in range(3)]


@pytest.mark.parametrize(
    ("topology", "setup"),
    [
        ("colocated", {}),
        ("colocated", {"look_ahead": 1}),
        ("colocated", {"policy": Policy(room=Room.CHUNKS)}),
        ("colocated", {"kv_dtype": KvDtype.INT8}),
        ("1+1", {}),
        ("1+1", {"direct": True, "policy": Policy(handoff=Handoff.DEVICE)}),
    ],
    ids=["colocated", "ahead", "chunk by chunk", "int8", "1+1", "from device to device"],
)
@pytest.mark.parametrize("num_prompt", [11, 12, 13])
@pytest.mark.parametrize(
    "sampling",
    [PLAIN, WARM, replace(WARM, frequency_penalty=1.0, logprobs=1)],
    ids=["greedy", "seeded", "penalised"],
)
def test_each_says_what_it_says_alone(
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    topology: str,
    setup: dict[str, Any],
    num_prompt: int,
    sampling: Sampling,
) -> None:
    folder, asked = folder_of("gqa-untied"), choices(sampling, PROMPT[:1] * 2 + prompt_of(7, num_prompt - 2))
    kv_dtype: KvDtype = setup.get("kv_dtype", KvDtype.AUTO)
    with_policy: dict[str, Any] = {"policy": Policy(), **setup}
    (tmp_path / "alone").mkdir()
    with deployed(folder, "colocated", ALONE, tmp_path / "alone", kv_dtype=kv_dtype) as alone:
        for one in asked:
            alone.asks(one)
            alone.works(100)
    with deployed(folder, topology, directory=tmp_path, **with_policy) as together:
        together.asks(replace(asked[0], id="before", prompt=prompt_of(3, 9)))  # all choices come while its step runs
        for one in asked:
            together.asks(one)
        together.works(300)
        assert together.is_idle
        assert {one.id: together.outputs[one.id] for one in asked} == alone.outputs
        assert together.slot_copies["moved"] == 2 * (num_prompt - (num_prompt - 1) // 4 * 4), "two got copies"
        assert not any(core.held["blocks"] for name, core in together.cores.items() if name != "pool-0")
