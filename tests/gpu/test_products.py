"""Tests of layers of quantised weights on the GPU, against the product with the expanded weight in fp64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.kernels.common import fp8
from alignedserve.kernels.common.fp8 import Fp8Linear, fp8_weight, in_fp8
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import quantised
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.kernels.triton.products import rows_in_fp8
from tests.gpu.cases import GPU, SOAK
from tests.gpu.layers import HALVES, random_layer

pytestmark = pytest.mark.usefixtures("unmeasured", "by_triton")
SEEDS = range(200 if SOAK else 12)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_layer_is_the_product_with_the_expanded_weight(seed: int, dtype: torch.dtype) -> None:
    case = random_layer(seed, dtype)
    case.check_floats(case.output(choose(GPU, dtype).kernels, GPU))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_and_weights_of_8_bits_are_multiplied_as_whole_numbers(seed: int, dtype: torch.dtype) -> None:
    case = random_layer(seed, dtype, is_plain=True)
    case.check_whole(case.output(choose(GPU, dtype).kernels, GPU))


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (8, 32), (8, 1024)])
@pytest.mark.parametrize("rows", [1, 17, 64, 300])
def test_results_of_a_large_layer_are_always_the_same(rows: int, bits: int, group: int) -> None:
    """Splits are summed in one order; a captured product says what the product says that is not captured."""
    generator = torch.Generator().manual_seed(rows)
    weight = quantised(torch.randn(3000, 1024, generator=generator), bits, group)
    linear = choose(GPU, torch.bfloat16).kernels.quantised(weight.on(GPU), None, torch.bfloat16)
    x = torch.randn(rows, 1024, generator=generator).to(GPU, torch.bfloat16)
    first = linear(x)
    exact = x.float().cpu() @ weight.expanded().T
    assert float((first.float().cpu() - exact).std() / exact.std()) < 0.01
    assert all(torch.equal(linear(x), first) for _ in range(5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear(x)
    graph.replay()
    assert torch.equal(captured, first)


@pytest.mark.parametrize("rows", [1, 33])
def test_weights_of_8_bit_floats(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = fp8_weight(torch.randn(256, 512, generator=generator).to(GPU))
    x = torch.randn(rows, 512, generator=generator).to(GPU, torch.bfloat16)
    kernels = choose(GPU, torch.bfloat16).kernels
    linear, exact = kernels.fp8(weight, None, torch.bfloat16), x.float() @ weight.expanded().T
    assert float((linear(x).float() - exact).std() / exact.std()) < 0.05
    if fp8.why_not_fp8(weight, torch.bfloat16) is not None:
        pytest.skip("this GPU has no 8-bit floats: the weight is expanded")
    assert isinstance(linear, Fp8Linear)
    ours, reference = rows_in_fp8(x), in_fp8(x)
    assert torch.allclose(ours[1], reference[1])
    assert float((ours[0].float() != reference[0].float()).float().mean()) < 0.001


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_wide_outputs_are_not_rounded_to_16_bits(rows: int, dtype: torch.dtype) -> None:
    weight, x = (torch.randn(size, 512, dtype=dtype, device=GPU) for size in (1000, rows))
    exact = x.double() @ weight.double().T
    found = Linear(weight).wide(x)
    assert found.dtype is torch.float32
    assert (found - exact).abs().max() < 1e-3  # numbers of about 23: rounded they were off by up to 0.1
