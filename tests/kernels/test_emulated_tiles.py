"""Tests the code for AMX's tiles on CPUs without them: tiles in plain C++ give the numbers that vectors give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.linear import BUCKETS, Linear, Tuning, Way
from alignedserve.kernels.library import Library, usable_sets
from alignedserve.kernels.native.kernels import Native
from tests.conftest import SOAK, examples
from tests.kernels.emulated_tiles import BEST_BELOW as _VECTORS
from tests.kernels.emulated_tiles import with_emulated_tiles
from tests.kernels.samples import packed
from tests.kernels.test_quantised import HALVES, WEIGHTS, allowed, drawn

pytestmark = [
    pytest.mark.skipif(not SOAK, reason="compiles the kernels once more: `make soak` does"),
    pytest.mark.skipif(_VECTORS not in usable_sets(), reason="code for AMX has AVX512-bf16 in it, which is missing"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_emulated_tiles(tmp_path_factory.mktemp("emulated"))


@settings(max_examples=examples(300))
@given(rows=st.integers(1, 70), dtype=st.sampled_from(HALVES), seed=st.integers(0, 1 << 30), **WEIGHTS)
def test_quantised_weights(
    library: Path,
    rows: int,
    dtype: torch.dtype,
    out: int,
    inputs: int,
    bits: int,
    group: int | None,
    of_scales: torch.dtype,
    zeros: bool,
    mixed: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = drawn(generator, out, inputs, bits, group or inputs, of_scales, zeros, mixed)
    x, bias = packed(generator, dtype, rows, inputs), packed(generator, dtype, out)
    made = Native(Library("amx", library)).quantised(weight, bias, dtype).wide(x)
    exact = x.double() @ weight.expanded().double().T + bias.double()
    # From 24 rows on x becomes bf16: fp16 loses three bits, bf16 nothing.
    of_error = 1.0 if rows < 24 or dtype is torch.float16 else 0.0
    assert bool(((made.double() - exact).abs() <= allowed(weight, x, of_error)).all())


@settings(max_examples=examples(100))
@given(rows=st.integers(1, 64), out=st.integers(1, 140), inputs=st.integers(1, 300), seed=st.integers(0, 1 << 30))
def test_bf16(library: Path, rows: int, out: int, inputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = packed(generator, torch.bfloat16, out, inputs), packed(generator, torch.bfloat16, rows, inputs)
    made: Any = Linear(weight, None, Library("amx", library)).wide(x)
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert bool(((made.double() - exact).abs() <= 1e-5 * magnitude + 1e-6).all())


@settings(max_examples=examples(100))
@given(
    rows=st.integers(1, 64),
    out=st.integers(1, 9).map(lambda vectors: 16 * vectors),
    inputs=st.integers(1, 150).map(lambda pairs: 2 * pairs),
    seed=st.integers(0, 1 << 30),
)
def test_packed_bf16(library: Path, rows: int, out: int, inputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = packed(generator, torch.bfloat16, out, inputs), packed(generator, torch.bfloat16, rows, inputs)
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    layer = Linear(weight, None, Library("amx", library))
    layer.use(Tuning({layer.shape: (Way.PACKED,) * len(BUCKETS)}))
    assert layer.packed
    assert bool(((layer.wide(x).double() - exact).abs() <= 1e-5 * magnitude + 1e-6).all())
