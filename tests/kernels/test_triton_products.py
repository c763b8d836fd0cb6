"""Tests of the Triton kernels for quantised weights in Triton's interpreter, against the product with the expanded
weight in fp64, on random shapes that divide no tile; and of layers of 8-bit floats, by torch's product on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.kernels.common.blocked import BlockedWeight
from alignedserve.kernels.common.fp8 import Fp8Linear, fp8_linear, fp8_weight, in_fp8
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.quantised import Fp8Weight, quantised
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from alignedserve.kernels.triton.products import rows_in_fp8
from tests.conftest import SOAK
from tests.gpu.layers import HALVES, LayerCase, random_layer
from tests.kernels.samples import packed, strided, threads
from tests.kernels.test_quantised import drawn
from tests.rare import thinned

KERNELS, REFERENCE = TritonKernels(), Reference()
CPU = torch.device("cpu")
DTYPES = (torch.float32, *HALVES)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of numbers that are spoilt on purpose
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu tries these kernels on the GPU"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.mark.parametrize(
    ("seed", "dtype"),
    [*product(range(200), DTYPES)] if SOAK else thinned(product(range(5), DTYPES), usual=7),
)
def test_a_layer_is_the_product_with_the_expanded_weight(seed: int, dtype: torch.dtype) -> None:
    case = random_layer(seed, dtype)
    case.check_floats(case.output(KERNELS, CPU))


@pytest.mark.parametrize(
    ("seed", "dtype"), [*product(range(200), HALVES)] if SOAK else thinned(product(range(4), HALVES), usual=3)
)
def test_rows_and_weights_of_8_bits_are_multiplied_as_whole_numbers(seed: int, dtype: torch.dtype) -> None:
    case = random_layer(seed, dtype, is_plain=True)
    case.check_whole(case.output(KERNELS, CPU))


def test_in_fp32_no_row_becomes_whole_numbers() -> None:
    case = random_layer(1, torch.float32, is_plain=True)
    case.check_floats(case.output(KERNELS, CPU))


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_and_outputs_of_a_layer(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = drawn(generator, 150, 70, bits, 32, torch.bfloat16, zeros=True, mixed=True)
    linear, wide = KERNELS.quantised(weight, None, torch.float32), weight.expanded()
    assert torch.equal(linear.weight, wide)
    chosen = torch.tensor([[3, 149], [64, 0]])
    assert torch.equal(linear.rows(chosen), wide[chosen])
    x = torch.randn(3, 70, generator=generator)
    assert torch.allclose(linear.below(40)(x), linear(x)[:, 40:], rtol=1e-4, atol=1e-3)
    smaller = 150 * (70 * bits // 8 + 8 * 3)
    assert linear.num_bytes < 1.9 * smaller, "one block is filled up"
    with pytest.raises(ValueError, match="do not fit a layer of 70"):
        linear(x[:, :60])


@pytest.mark.parametrize("group", [100, 32])
def test_a_row_that_is_no_number_spoils_no_other(group: int) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = KERNELS.quantised(quantised(torch.randn(50, 100, generator=generator), 8, group), None, torch.bfloat16)
    for spoiled in (float("nan"), float("inf")):
        x = packed(generator, torch.bfloat16, 7, 100)
        clean = linear(x)
        x[1, 3] = spoiled
        spoilt = linear(x)
        assert not spoilt[1].isfinite().any()
        others = [row for row in range(7) if row != 1]
        assert torch.equal(spoilt[others], clean[others])
    assert torch.equal(linear(torch.zeros(1, 100).bfloat16()), torch.zeros(1, 50).bfloat16())
    assert linear(torch.empty(0, 100).bfloat16()).shape == (0, 50)


def test_the_reference_says_what_a_kernel_is_to_say() -> None:
    """It takes the place of a kernel that does not work."""
    case = random_layer(3, torch.float32)
    weight, x = BlockedWeight.from_weight(case.weight), case.x
    out = torch.ones(x.shape[0], weight.shape[0])
    for adds, beside in ((False, 0.0), (True, 1.0)):
        out.fill_(beside)
        REFERENCE.multiply(x, weight, None, out, adds)
        LayerCase(x, case.weight, None, torch.full_like(out, beside), False).check_floats(out)


def floats(generator: torch.Generator, out: int, inputs: int) -> Fp8Weight:
    return fp8_weight(torch.randn(out, inputs, generator=generator))


def test_weights_of_8_bit_floats_are_near() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    assert float((fp8_weight(weight).expanded() - weight).std()) < 0.04


def test_rows_become_8_bit_floats_as_in_torch() -> None:
    x = strided(torch.Generator().manual_seed(1), torch.bfloat16, 5, 70)
    (rows, scale), (expected, of_expected) = rows_in_fp8(x), in_fp8(x)
    assert torch.allclose(scale, of_expected)
    apart = (rows.float() - expected.float()).abs() / expected.float().abs().clamp_min(1)
    assert float(apart.max()) <= 0.5, "the interpreter rounds up to a power of two to the one below"
    assert float((apart > 0).float().mean()) < 0.1
    x[2, 0] = float("inf")
    assert rows_in_fp8(x)[1].isnan().flatten().tolist() == [False, False, True, False, False]


def test_a_layer_of_8_bit_floats() -> None:
    """The layer expands its weight where torch has no such product for this CPU, and is off by less then."""
    generator = torch.Generator().manual_seed(2)
    weight, bias = floats(generator, 48, 64), packed(generator, torch.bfloat16, 48)
    x, y = packed(generator, torch.bfloat16, 5, 64), packed(generator, torch.bfloat16, 5, 48)
    linear = fp8_linear(weight, bias, torch.bfloat16)
    exact = x.float() @ weight.expanded().T + bias.float()
    assert float((linear.wide(x) - exact).std()) < 0.4  # of numbers that spread by 8
    assert torch.allclose(linear.below(16)(x), linear(x)[:, 16:], atol=0.1)
    assert torch.equal(linear.rows(torch.tensor([3, 0])), weight.expanded()[[3, 0]].bfloat16())
    expected = y + linear(x)
    linear.add_to(x, y)
    assert torch.equal(y, expected)


def test_what_torch_cannot_multiply_as_8_bit_floats_is_expanded() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = floats(generator, 30, 64)
    for linear in (KERNELS.fp8(weight, None, torch.bfloat16), KERNELS.fp8(weight, None, torch.float32)):
        assert type(linear) is Linear
        assert not isinstance(linear, Fp8Linear)
    x = torch.randn(3, 64, generator=generator)
    assert torch.allclose(REFERENCE.fp8(weight, None, torch.float32)(x), x @ weight.expanded().T, rtol=1e-4, atol=1e-4)
