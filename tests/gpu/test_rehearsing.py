"""Tests that Triton measures before the first step: all choices of each kernel, on enough work to be worth it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.architectures.quantization import Quantization
from alignedserve.core import Sampling
from alignedserve.engine.engine import Engine
from alignedserve.kernels.triton.attention import _attend
from alignedserve.kernels.triton.products import _multiply
from alignedserve.kernels.triton.sampling import _draw, _logprobs
from tests.engine.driver import Driver, prompt_of
from tests.gpu.cases import GPU
from tests.models import MODELS


def test_no_step_waits_until_something_is_measured(tmp_path: Path) -> None:
    engine = Engine(
        MODELS["gqa-untied"](tmp_path / "model"),
        num_blocks=90,
        dtype="bfloat16",
        quantization=Quantization.INT4,
        device=GPU,
    )
    engine.rehearse()
    known = [len(kernel.cache) for kernel in (_attend, _draw, _logprobs, _multiply)]
    assert all(known)
    assert known[0] >= 2, "decodes and chunks"
    driver = Driver(engine, 1)
    live = driver.start("r", prompt_of(1, 40), 20)
    driver.run(live, parts=[live.chunk(40)])
    driver.run(live, parts=[live.decode(Sampling(0.8, top_k=5, top_p=0.9, logprobs=3))])
    assert [len(kernel.cache) for kernel in (_attend, _draw, _logprobs, _multiply)] == known
