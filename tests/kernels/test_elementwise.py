"""Tests of the kernels that treat each token alone: every instruction set against the reference in fp32, on the same
inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import Kernels
from tests.kernels.every import on_all_kernels
from tests.kernels.samples import DTYPES, packed, rounding, strided, threads

ROWS, WIDTHS, SEEDS = st.integers(0, 40), st.integers(1, 150), st.integers(0, 1 << 30)
EPS = 1e-5
REFERENCE = Reference()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def check(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, roundings: int) -> None:
    """Check the result, which may be off by as many roundings to the dtype as its definition has at most.
    The first roundings may be of numbers that are a few times as large."""
    assert got.dtype is dtype
    torch.testing.assert_close(got.float(), exact, rtol=2 * roundings * rounding(dtype) + 1e-5, atol=_atol(dtype))


def _atol(dtype: torch.dtype) -> float:
    return 4 * rounding(dtype) + 2e-6


@on_all_kernels
@settings(deadline=None)
@given(rows=ROWS, heads=st.integers(0, 4), width=WIDTHS, dtype=DTYPES, seed=SEEDS)
def test_rms_norm(kernels: Kernels, rows: int, heads: int, width: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, heads, width) if heads else (rows, width)
    x, weight = strided(generator, dtype, *shape), packed(generator, dtype, width)
    got = kernels.rms_norm(x, weight, EPS)
    assert got.is_contiguous()
    check(got, REFERENCE.rms_norm(x.float(), weight.float(), EPS), dtype, 2)
    fine = weight.float() * 1.001  # no number of 16 bits
    check(kernels.rms_norm(x, fine, EPS), REFERENCE.rms_norm(x.float(), fine, EPS), dtype, 1)


@on_all_kernels
@settings(deadline=None)
@given(rows=ROWS, width=WIDTHS, dtype=DTYPES, parts=st.sampled_from(["", "weight", "both"]), seed=SEEDS)
def test_layer_norm(kernels: Kernels, rows: int, width: int, dtype: torch.dtype, parts: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = strided(generator, dtype, rows, width)
    weight = packed(generator, dtype, width) if parts else None
    bias = packed(generator, dtype, width) if parts == "both" else None
    heavy, shift = (None if tensor is None else tensor.float() for tensor in (weight, bias))
    exact = REFERENCE.layer_norm(x.float(), heavy, shift, EPS)
    check(kernels.layer_norm(x, weight, bias, EPS), exact, dtype, 1)


@on_all_kernels
@settings(deadline=None)
@given(
    rows=ROWS,
    heads=st.integers(1, 4),
    half=st.integers(1, 40),
    rest=st.sampled_from([0, 1, 24]),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_rotate(kernels: Kernels, rows: int, heads: int, half: int, rest: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    fused = packed(generator, dtype, rows, heads + 2, 2 * half + rest)
    before = fused.clone()
    angles = torch.randn(rows, half, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    kernels.rotate(fused[:, 1 : 1 + heads], cos, sin)
    exact = before[:, 1 : 1 + heads].float().contiguous()
    REFERENCE.rotate(exact, cos.to(dtype).float(), sin.to(dtype).float())
    check(fused[:, 1 : 1 + heads], exact, dtype, 2)
    assert torch.equal(fused[..., 2 * half :], before[..., 2 * half :]), "partial rotary leaves the rest"
    assert torch.equal(fused[:, 0], before[:, 0])
    assert torch.equal(fused[:, 1 + heads :], before[:, 1 + heads :])


@on_all_kernels
@settings(deadline=None)
@given(rows=ROWS, width=WIDTHS, dtype=DTYPES, seed=SEEDS)
def test_gates(kernels: Kernels, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    gate_up = strided(torch.Generator().manual_seed(seed), dtype, rows, 2 * width)
    check(kernels.silu_mul(gate_up), REFERENCE.silu_mul(gate_up.float()), dtype, 2)
    check(kernels.gelu_mul(gate_up), REFERENCE.gelu_mul(gate_up.float()), dtype, 2)


@on_all_kernels
def test_gates_of_extremes(kernels: Kernels) -> None:
    gate = torch.tensor([-1e30, -200.0, -20.0, 0.0, 200.0, 1e30])
    gate_up = torch.cat((gate, torch.ones(6)))[None]
    torch.testing.assert_close(kernels.silu_mul(gate_up)[0], F.silu(gate), rtol=1e-5, atol=1e-6)
    of_gelu = F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(kernels.gelu_mul(gate_up)[0], of_gelu, rtol=1e-5, atol=1e-6)


@on_all_kernels
@settings(deadline=None)
@given(rows=ROWS, width=WIDTHS, dtype=DTYPES, seed=SEEDS)
def test_gelu(kernels: Kernels, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    x = 3 * packed(torch.Generator().manual_seed(seed), dtype, rows, width)
    exact = torch.nn.functional.gelu(x.double()).float()
    check(kernels.gelu(x), exact, dtype, 1)


@on_all_kernels
def test_gelu_of_extremes(kernels: Kernels) -> None:
    x = torch.tensor([-1e30, -200.0, -6.0, 0.0, 1e-20, 200.0, 1e30])
    exact = torch.nn.functional.gelu(x.double()).float()
    torch.testing.assert_close(kernels.gelu(x), exact, rtol=1e-5, atol=1e-6)


def _each(kernels: Kernels) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    weight = torch.ones(66, dtype=torch.bfloat16)
    return {
        "rms_norm": lambda x: kernels.rms_norm(x, weight, EPS),
        "layer_norm": lambda x: kernels.layer_norm(x, weight, weight, EPS),
        "silu_mul": kernels.silu_mul,
        "gelu_mul": kernels.gelu_mul,
        "gelu": lambda x: kernels.gelu(x.clone()),
    }


@on_all_kernels
def test_a_row_that_is_no_number_spoils_no_other(kernels: Kernels) -> None:
    clean = packed(torch.Generator().manual_seed(3), torch.bfloat16, 5, 66)
    spoilt = clean.clone()
    spoilt[2] = float("nan")
    clean_rows = [0, 1, 3, 4]
    for name, run in _each(kernels).items():
        got = run(spoilt)
        assert got[2].isnan().all(), name
        assert torch.equal(got[clean_rows], run(clean)[clean_rows]), name


@on_all_kernels
def test_the_number_of_threads_changes_nothing(kernels: Kernels) -> None:
    x = packed(torch.Generator().manual_seed(4), torch.bfloat16, 600, 66)
    for name, run in _each(kernels).items():
        alone = run(x)
        with threads(3):
            assert torch.equal(run(x), alone), name
