"""Tests of mixtures of experts whose experts run at once, in Triton's interpreter: they say what transformers says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.architectures.quantization import Quantization
from alignedserve.engine.engine import Engine
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.probing import replace
from alignedserve.kernels.triton.experts import TritonExperts
from alignedserve.kernels.triton.launch import interpreting
from tests.engine.driver import Driver, prompt_of
from tests.rare import rarely
from tests.reference import Tally, compare

pytestmark = pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu tries it on the GPU")


class WithExperts(TritonExperts, Reference):
    """The reference, but for experts."""

    captures = True


@pytest.mark.parametrize("name", ["gpt-oss", *map(rarely, ("mixtral", "qwen2-moe", "deepseek-v3", "llama4"))])
def test_experts_at_once_say_what_transformers_says(
    name: str, folder_of: Callable[[str], Path], reference_of: Callable[[Path], Any], tally: Tally
) -> None:
    folder = folder_of(name)
    driver = Driver(Engine(folder, num_blocks=30, dtype="float32", kernels=WithExperts()), 1)
    live = driver.start("r", prompt_of(3, 7), 2)
    driver.prefill(live)
    compare(reference_of(folder), live.prompt, driver.generate(live, 2), tally, name)


@pytest.mark.parametrize(
    ("kernels", "quantization", "why"),
    [
        (WithExperts(), Quantization.NONE, None),
        (WithExperts(), Quantization.INT8, "experts with quantised weights run one after another"),
        (Reference(), Quantization.NONE, "which experts a step needs is known only when it runs, with torch reference"),
    ],
    ids=["plain", "quantised", "reference"],
)
def test_why_steps_are_not_captured(
    kernels: Reference, quantization: Quantization, why: str | None, folder_of: Callable[[str], Path]
) -> None:
    engine = Engine(folder_of("mixtral"), num_blocks=4, dtype="float32", kernels=kernels, quantization=quantization)
    engine.device = torch.device("cuda", 0)  # the engine has run nothing yet
    told = engine.why_no_graphs
    assert told is None if why is None else told is not None and told.startswith(why)


def test_experts_that_failed_are_why_steps_are_not_captured(folder_of: Callable[[str], Path]) -> None:
    """The reference takes the place of a kernel that fails, and waits."""
    kernels = WithExperts()
    engine = Engine(folder_of("mixtral"), num_blocks=4, dtype="float32", kernels=kernels)
    engine.device = torch.device("cuda", 0)
    assert engine.why_no_graphs is None
    replace(kernels, ["add_experts"])
    assert "which experts a step needs" in (engine.why_no_graphs or "")
