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
from alignedserve.kernels.common.experts import ExpertLinear
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.probing import replace
from alignedserve.kernels.triton.experts import TritonExperts
from alignedserve.kernels.triton.launch import interpreting
from tests.engine.driver import Driver, prompt_of
from tests.models import qwen3_moe
from tests.quantised_folders import _AWQ, FORMS, Form, _of, awq, float8, quantised_folder
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


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [24, 32]}
STORED: dict[str, Form] = {
    "fp8 blocks": (BLOCKS, lambda weight: float8(weight, 24, 32, "weight_scale_inv")),
    "fp8": FORMS["fp8-channel"],
    "int8": FORMS["w8a16"],
    "int4": (_AWQ | {"group_size": 32}, _of(awq, 4, 32)),
}


@pytest.mark.parametrize("form", ["fp8 blocks", "int4", *map(rarely, ("fp8", "int8"))])
def test_stored_experts_say_what_they_say_expanded(form: str, tmp_path: Path, tally: Tally) -> None:
    """They stay quantised, run at once, and wait for nothing."""
    plain = qwen3_moe(tmp_path / "plain", hidden_size=64, moe_intermediate_size=64)
    network = quantised_folder(plain, tmp_path / "model", STORED[form])
    engine = Engine(tmp_path / "model", num_blocks=30, dtype="float32", kernels=WithExperts())
    mixtures = [*engine._mixtures.values()]
    assert all(isinstance(layer, ExpertLinear) for of in mixtures for layer in (*of.ups, *of.downs))
    driver = Driver(engine, 1)
    live = driver.start("r", prompt_of(3, 7), 6)
    driver.prefill(live)
    compare(network, live.prompt, driver.generate(live, 6), tally, form)
    engine.device = torch.device("cuda", 0)
    assert engine.why_no_graphs is None


@pytest.mark.parametrize("form", ["gptq-4-act-order", rarely("w4a16")])
def test_experts_of_other_forms_run_in_turn(form: str, tmp_path: Path, tally: Tally) -> None:
    """Their inputs have an order, or groups are smaller than a tile."""
    network = quantised_folder(qwen3_moe(tmp_path / "plain"), tmp_path / "model", form)
    engine = Engine(tmp_path / "model", num_blocks=30, dtype="float32", kernels=WithExperts())
    driver = Driver(engine, 1)
    live = driver.start("r", prompt_of(3, 7), 3)
    driver.prefill(live)
    compare(network, live.prompt, driver.generate(live, 3), tally, form)
    engine.device = torch.device("cuda", 0)
    assert "small groups" in (engine.why_no_graphs or "")


def test_floats_in_small_blocks_are_expanded(tmp_path: Path) -> None:
    quantised_folder(qwen3_moe(tmp_path / "plain", moe_intermediate_size=32), tmp_path / "model", "fp8-block")
    engine = Engine(tmp_path / "model", num_blocks=4, dtype="float32", kernels=WithExperts())
    assert [of.packings for of in engine._mixtures.values()] == [[None, None]]


@pytest.mark.parametrize(
    ("kernels", "quantization", "why"),
    [
        (WithExperts(), Quantization.NONE, None),
        (WithExperts(), Quantization.INT8, None),
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
