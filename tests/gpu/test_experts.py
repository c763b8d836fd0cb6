"""Tests of experts that run all at once, compiled for the GPU that is here, against one after another in fp64; and that
they wait for nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.architectures.quantization import Quantization
from alignedserve.architectures.routing import Routing, Scores
from alignedserve.engine.device.devices import free_memory
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import CudaCapture
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.kernels.triton.experts import _by_expert, _fits, tile_rows
from alignedserve.kernels.triton.launch import with_choice
from tests.engine.driver import Driver, prompt_of
from tests.gpu.cases import GPU, SOAK
from tests.gpu.mixtures import FORMS, MixtureCase, random_mixture
from tests.models import MODELS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = range(200 if SOAK else 6)
EXPERTS = 8

pytestmark = pytest.mark.usefixtures("by_triton")


def usual(rows: int) -> MixtureCase:
    return MixtureCase.made(rows, torch.bfloat16, rows=rows, experts=EXPERTS, taken=2, hidden=256, inner=384)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_row_gets_what_its_experts_make(seed: int, dtype: torch.dtype) -> None:
    case = random_mixture(seed, dtype)
    case.check(case.sums(choose(GPU, dtype).kernels, GPU))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_quantised_experts_are_what_they_are_expanded(seed: int, dtype: torch.dtype, form: str) -> None:
    case = replace(random_mixture(seed, dtype), form=form)
    case.check(case.sums(choose(GPU, dtype).kernels, GPU))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("form", [None, "fp8", "int4 of large groups"])
@pytest.mark.parametrize("rows", [1, 7, 64, 130, 260, 600])
def test_all_sizes_of_blocks(rows: int, form: str | None) -> None:
    case = replace(usual(rows), form=form)
    case.check(case.sums(choose(GPU, torch.bfloat16).kernels, GPU))


@pytest.mark.parametrize(("form", "bits", "group"), [(None, 0, 1 << 30), ("int4 of large groups", 4, 128)])
@pytest.mark.parametrize("rows", [2, 600])
def test_all_choices_say_the_same(rows: int, form: str | None, bits: int, group: int) -> None:
    """The tuner tries all that fit, and any may be the fastest."""
    case, kernels = replace(usual(rows), form=form), choose(GPU, torch.bfloat16).kernels
    sizes = {"x": case.x, "GATED": True, "ROWS": tile_rows(case.chosen.numel(), EXPERTS, torch.bfloat16)}
    sizes |= {"BITS": bits, "GROUP": group}
    for number, choice in enumerate(_by_expert.configs):
        if _fits(choice, sizes):
            with with_choice(number):
                case.check(case.sums(kernels, GPU))


@pytest.mark.parametrize("scores", [*Scores])
def test_rows_choose_the_experts_that_torch_chooses(scores: Scores) -> None:
    generator = torch.Generator().manual_seed(1)
    for experts, groups, bias in ((60, 1, False), (128, 1, False), (256, 8, True)):
        routing = Routing(experts=experts, chosen=8, scores=scores, groups=groups, chosen_groups=4, is_normalised=True)
        logits = torch.randn(50, experts, generator=generator)
        of_choice = torch.randn(experts, generator=generator) / 4 if bias else None
        chosen, shares = choose(GPU, torch.float32).kernels.route(
            logits.to(GPU), routing, None if of_choice is None else of_choice.to(GPU)
        )
        expected, of_expected = Reference().route(logits, routing, of_choice)
        whole = torch.zeros(50, experts)
        torch.testing.assert_close(
            whole.scatter(1, chosen.cpu(), shares.cpu()), whole.scatter(1, expected, of_expected), rtol=1e-4, atol=1e-6
        )


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("form", [None, "fp8"])
@pytest.mark.parametrize("rows", [1, 40])
def test_nothing_waits_to_learn_which_experts_run(rows: int, form: str | None) -> None:
    """CUDA's own check is on: any wait raises an error."""
    case, kernels = replace(usual(rows), form=form), choose(GPU, torch.bfloat16).kernels
    weights, out = case.weights(kernels, GPU), case.beside.to(GPU)
    x, chosen, shares = (each.to(GPU) for each in (case.x, case.chosen, case.shares))
    kernels.add_experts(x, weights, chosen, shares, out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.add_experts(x, weights, chosen, shares, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_step_waits_until_experts_are_measured(tmp_path: Path) -> None:
    engine = Engine(MODELS["mixtral"](tmp_path / "model"), num_blocks=90, dtype="bfloat16", device=GPU)
    engine.rehearse()
    known = len(_by_expert.cache)
    assert known >= 4, "gate and up, and down, for a row alone and for more"
    driver = Driver(engine, 1)
    live = driver.start("r", prompt_of(1, 40), 20)
    driver.prefill(live)
    driver.generate(live, 3)
    assert len(_by_expert.cache) == known


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_steps_with_quantised_experts_are_captured(tmp_path: Path, quantization: Quantization) -> None:
    """All was measured in the rehearsal."""
    folder = MODELS["mixtral"](tmp_path / "model")
    engine = Engine(folder, num_blocks=40, dtype="bfloat16", quantization=quantization, device=GPU, has_graphs=True)
    assert engine.why_no_graphs is None
    engine.rehearse()
    engine.capture(4, CudaCapture(GPU), lambda: free_memory(GPU) or 0, 0)
    assert engine.why_no_graphs is None, "no kernel was replaced"
    driver = Driver(engine, 1)
    live = driver.start("r", prompt_of(1, 20), 4)
    driver.prefill(live)
    assert len(driver.generate(live, 4)) == 4
