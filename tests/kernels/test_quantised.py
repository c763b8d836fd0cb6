"""Tests that linear layers of quantised weights give the product with the expanded weight."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.quantised import PackedWeight, QuantisedWeight, quantised, stacked
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.library import Library
from tests.conftest import examples
from tests.kernels.every import native_sets, on_all_kernels, on_native_kernels
from tests.kernels.samples import packed, strided, threads

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def drawn(
    generator: torch.Generator,
    out: int,
    inputs: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
    zeros: bool,
    mixed: bool,
) -> QuantisedWeight:
    """Return a weight with any whole numbers, all of its scales and zeros of this dtype."""
    groups = -(-inputs // group)
    q = torch.randint(0, 1 << bits, (out, inputs), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(out, groups, generator=generator) + 0.1).to(dtype)
    zero = torch.randint(0, 1 << bits, (out, groups), generator=generator).to(dtype) if zeros else None
    order = torch.randperm(inputs, generator=generator) if mixed else None
    return QuantisedWeight(q, scale, zero, bits, group, order)


WEIGHTS = {
    "out": st.integers(1, 140),
    "inputs": st.integers(1, 300),
    "bits": st.sampled_from([8, 4]),
    "group": st.sampled_from([8, 24, 32, 128, None]),  # None: one group
    "of_scales": st.sampled_from([torch.float32, *HALVES]),
    "zeros": st.booleans(),
    "mixed": st.booleans(),
}


@on_native_kernels
@settings(deadline=None, max_examples=examples(60))
@given(
    rows=st.integers(1, 15),
    with_bias=st.booleans(),
    into=st.sampled_from(["rounded", "added", "wide"]),
    apart=st.booleans(),
    seed=st.integers(0, 1 << 30),
    **WEIGHTS,
)
def test_fp32_is_the_exact_product(
    kernels: Kernels,
    rows: int,
    out: int,
    inputs: int,
    bits: int,
    group: int | None,
    of_scales: torch.dtype,
    zeros: bool,
    mixed: bool,
    with_bias: bool,
    into: str,
    apart: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = drawn(generator, out, inputs, bits, group or inputs, of_scales, zeros, mixed)
    x = (strided if apart else packed)(generator, torch.float32, rows, inputs)
    bias = packed(generator, torch.float32, out) if with_bias else None
    linear = kernels.quantised(weight, bias, torch.float32)
    wide = weight.expanded().double()
    exact = x.double() @ wide.T
    magnitude = x.double().abs() @ wide.abs().T
    if bias is not None:
        exact = exact + bias.double()
    if into == "added":
        y = packed(generator, torch.float32, rows, out)
        exact = exact + y.double()
        linear.add_to(x, y)
    else:
        y = linear(x) if into == "rounded" else linear.wide(x)
    assert bool(((y.double() - exact).abs() <= 2e-6 * (magnitude + exact.abs()) + 1e-6).all())


@on_native_kernels
@settings(deadline=None, max_examples=examples(60))
@given(
    rows=st.one_of(st.integers(1, 15), st.sampled_from([16, 17, 23, 24, 33, 40])),
    dtype=st.sampled_from(HALVES),
    seed=st.integers(0, 1 << 30),
    **WEIGHTS,
)
def test_halves_are_multiplied_in_blocks_of_whole_numbers(
    kernels: Kernels,
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
    """The only error is that of x: at most half a 127th of the largest number of its block."""
    generator = torch.Generator().manual_seed(seed)
    weight = drawn(generator, out, inputs, bits, group or inputs, of_scales, zeros, mixed)
    x = packed(generator, dtype, rows, inputs)
    y = kernels.quantised(weight, None, dtype).wide(x)
    assert bool(((y.double() - x.double() @ weight.expanded().double().T).abs() <= allowed(weight, x)).all())


def allowed(weight: QuantisedWeight, x: torch.Tensor, of_error: float = 1.0) -> torch.Tensor:
    """Return how far products may be off: `of_error` times what rounding x by blocks may cost, and what fp32 may."""
    wide = weight.expanded().double()
    block = gcd(32, weight.group) if weight.group < weight.shape[1] else 32
    columns = torch.arange(weight.shape[1]) if weight.order is None else weight.order
    most = F.pad(x.double().abs()[:, columns], (0, -weight.shape[1] % block)).view(len(x), -1, block).amax(2)
    rounding = (most / 254).repeat_interleave(block, 1)[:, : weight.shape[1]] @ wide[:, columns].abs().T
    magnitude = (1 << weight.bits) * weight.scale.double().amax(1) * x.double().abs().sum(1, keepdim=True)
    return of_error * rounding + 1e-6 * magnitude + 1e-6


@pytest.mark.parametrize("isa", native_sets())
@settings(deadline=None, max_examples=examples(30))
@given(seed=st.integers(0, 1 << 30), **WEIGHTS)
def test_the_kernel_packs_as_torch_does(
    isa: str,
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
    by_torch, by_kernel = (PackedWeight.from_weight(weight, library) for library in (None, Library(isa)))
    assert torch.equal(by_kernel.memory, by_torch.memory)
    assert torch.equal(by_kernel.scale, by_torch.scale)
    assert torch.equal(by_kernel.rows(torch.arange(out)).zeros, by_torch.rows(torch.arange(out)).zeros)
    assert torch.equal(by_torch.rows(torch.arange(out)).q, weight.q)


@on_native_kernels
@pytest.mark.parametrize("bits", [8, 4])
def test_an_input_that_is_a_hundred_times_the_others_does_not_round_them_away(kernels: Kernels, bits: int) -> None:
    """Two inputs have a hundred times the size of the others in every row, as outliers of real models have."""
    generator = torch.Generator().manual_seed(0)
    weight = drawn(generator, 70, 576, bits, 32, torch.bfloat16, zeros=True, mixed=False)
    x = packed(generator, torch.bfloat16, 9, 576)
    plain = kernels.quantised(weight, None, torch.bfloat16).wide(x) - x.float() @ weight.expanded().T
    x[:, [5, 300]] *= 100
    error = kernels.quantised(weight, None, torch.bfloat16).wide(x) - x.float() @ weight.expanded().T
    of_sums = 1e-6 * x.float().abs() @ weight.expanded().abs().T  # where x is not rounded, fp32's sums alone are off
    assert float(error.norm()) < 2 * float(plain.norm()) + float(of_sums.norm())


@on_all_kernels
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_and_outputs_of_a_layer(kernels: Kernels, bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = drawn(generator, 150, 70, bits, 32, torch.bfloat16, zeros=True, mixed=False)
    linear = kernels.quantised(weight, None, torch.float32)
    wide = weight.expanded()
    assert torch.equal(linear.weight, wide)
    chosen = torch.tensor([[3, 149], [64, 0]])
    assert torch.equal(linear.rows(chosen), wide[chosen])
    x = torch.randn(3, 70, generator=generator)
    assert torch.allclose(linear.below(40)(x), linear(x)[:, 40:], rtol=1e-4, atol=1e-3)


@on_native_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_no_number_spoils_no_other(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantised(torch.randn(50, 100, generator=generator), 8, 100)
    linear = kernels.quantised(weight, None, dtype)
    for spoiled in (float("nan"), float("inf")):
        x = packed(generator, dtype, 7, 100)
        clean = linear(x)
        x[1, 3] = spoiled
        spoilt = linear(x)
        assert not spoilt[1].isfinite().any()
        others = [row for row in range(7) if row != 1]
        assert torch.equal(spoilt[others], clean[others])


@on_native_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_threads_nor_other_rows_change_a_row(kernels: Kernels, dtype: torch.dtype) -> None:
    """Tiles, which AMX takes from 24 rows on, do not round x."""
    generator = torch.Generator().manual_seed(3)
    linear = kernels.quantised(quantised(torch.randn(200, 96, generator=generator), 4, 32), None, dtype)
    x = packed(generator, dtype, 37, 96)
    few = 1 if dtype is torch.float32 or "amx" not in kernels.name else 24
    alone = torch.cat([linear(x[row : row + few])[:1] for row in range(37 - few + 1)])
    with threads(3):
        assert torch.equal(linear(x)[: len(alone)], alone)


@on_native_kernels
def test_rows_of_zeros_and_of_tiny_numbers(kernels: Kernels) -> None:
    linear = kernels.quantised(quantised(torch.ones(64, 64), 8, 64), None, torch.bfloat16)
    assert torch.equal(linear(torch.zeros(2, 64).bfloat16()), torch.zeros(2, 64).bfloat16())
    assert bool(linear(torch.full((1, 64), 1e-38).bfloat16()).isfinite().all())
    assert linear(torch.empty(0, 64).bfloat16()).shape == (0, 64)


@pytest.mark.parametrize(("bits", "group", "most"), [(8, 768, 0.01), (8, 32, 0.006), (4, 64, 0.09), (4, 32, 0.075)])
def test_quantising_is_near(bits: int, group: int, most: float) -> None:
    """The error of a weight of random numbers, as a share of their spread."""
    weight = torch.randn(256, 768, generator=torch.Generator().manual_seed(1))
    assert float((quantised(weight, bits, group).expanded() - weight).std()) < most


def test_a_weight_on_a_grid_of_sixteen_steps_is_found_again() -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randint(0, 16, (64, 256), generator=generator, dtype=torch.uint8)
    q[:, ::32], q[:, 1::32] = 0, 15
    scale = (torch.rand(64, 8, generator=generator) + 0.5).bfloat16()
    weight = QuantisedWeight(q, scale, torch.full((64, 8), 7.5).bfloat16(), 4, 32).expanded()
    step = scale.float().repeat_interleave(32, 1)
    assert float(((quantised(weight, 4, 32).expanded() - weight) / step).abs().max()) < 0.1


@pytest.mark.parametrize("middle", [1.0, 10.0, -10.0])
def test_four_bits_of_numbers_far_from_zero_are_no_further_than_by_rounding(middle: float) -> None:
    """Their best zero is below 0, or above 15, where no zero can be."""
    generator = torch.Generator().manual_seed(5)
    weight = middle + 0.3 * torch.randn(64, 256, generator=generator)
    step = weight.abs().unflatten(1, (-1, 32)).amax(2) / 15
    for squares in (None, torch.rand(256, generator=generator) ** 8):
        error = (quantised(weight, 4, 32, squares).expanded() - weight).unflatten(1, (-1, 32))
        assert float((error / step[..., None]).std()) < 0.35


def test_an_error_counts_as_much_as_its_input_is_large() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, squares = torch.randn(64, 256, generator=generator), torch.rand(256, generator=generator) ** 8 * 100
    alike, counted = (quantised(weight, 4, 32, of).expanded() - weight for of in (None, squares))
    assert float((counted**2 @ squares).sum()) < 0.8 * float((alike**2 @ squares).sum())
    assert float((counted**2).sum()) < 3 * float((alike**2).sum())
    silent = quantised(weight, 4, 32, torch.zeros(256)).expanded()
    assert torch.allclose(silent, quantised(weight, 4, 32).expanded()), "inputs that all count alike"


def test_zeros_are_exact_in_bf16_with_what_is_taken_from_them() -> None:
    """So GPUs, which multiply with numbers less their zeros, round none."""
    made = quantised(torch.randn(64, 256, generator=torch.Generator().manual_seed(4)) + 0.5, 4, 32)
    less = made.q.float().unflatten(1, (-1, 32)) - made.zeros.float()[..., None]
    assert torch.equal(less.bfloat16().float(), less)


def test_a_weight_of_zeros_or_of_equal_numbers_stays_what_it_is() -> None:
    for bits in (8, 4):
        for number in (0.0, 2.0, -3.0):
            weight = torch.full((4, 64), number)
            assert torch.allclose(quantised(weight, bits, 32).expanded(), weight, rtol=0.01)


@given(
    seed=st.integers(0, 1 << 30),
    bits=st.sampled_from([8, 4]),
    of_scales=st.lists(st.sampled_from([torch.float32, *HALVES]), min_size=1, max_size=3),
    with_zeros=st.integers(0, 7),
)
def test_stacked_weights_are_the_weights(seed: int, bits: int, of_scales: list[torch.dtype], with_zeros: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [
        drawn(generator, 3 + place, 40, bits, 16, dtype, bool(with_zeros >> place & 1), mixed=False)
        for place, dtype in enumerate(of_scales)
    ]
    whole = stacked(weights)
    assert whole is not None
    assert torch.equal(whole.expanded(), torch.cat([weight.expanded() for weight in weights]))


def test_weights_of_other_bits_and_groups_are_stacked_and_of_other_orders_not() -> None:
    generator = torch.Generator().manual_seed(0)

    def of(bits: int, group: int, mixed: bool) -> QuantisedWeight:
        return drawn(generator, 4, 64, bits, group, torch.float32, zeros=False, mixed=mixed)

    weight, other = of(4, 16, mixed=False), of(4, 16, mixed=True)
    coarser = of(8, 32, mixed=False)
    both = stacked([weight, coarser])
    assert both is not None
    assert (both.bits, both.group) == (8, 16)
    assert torch.equal(both.expanded(), torch.cat([weight.expanded(), coarser.expanded()]))
    assert stacked([weight, other]) is None
    assert stacked([other, of(4, 16, mixed=True)]) is None
    assert stacked([other, other.rows(slice(0, 2))]) is not None


@given(
    groups=st.integers(1, 4),
    group=st.sampled_from([8, 24, 32]),
    first=st.integers(0, 15),
    count=st.integers(1, 16),
    seed=st.integers(0, 1 << 30),
)
def test_a_part_of_the_inputs_is_that_part_of_the_weight(
    groups: int, group: int, first: int, count: int, seed: int
) -> None:
    """Parts that begin and end at multiples of eight inputs are always there."""
    generator, inputs = torch.Generator().manual_seed(seed), groups * group
    first = 8 * first % inputs
    count = min(8 * count, inputs - first)
    weight = drawn(generator, 5, inputs, 4, group, torch.float16, zeros=bool(seed % 2), mixed=False)
    part = weight.inputs(first, count)
    assert part is not None
    assert torch.equal(part.expanded(), weight.expanded()[:, first : first + count])


def test_groups_that_the_kernel_does_not_take() -> None:
    weight = drawn(torch.Generator(), 8, 16, 8, 4, torch.float32, zeros=False, mixed=False)
    with pytest.raises(ValueError, match="groups of 4 inputs: the kernel takes multiples of 8"):
        PackedWeight.from_weight(weight)


def test_a_part_of_inputs_that_would_cut_groups_too_small() -> None:
    generator = torch.Generator().manual_seed(0)

    def of(inputs: int, group: int, mixed: bool) -> QuantisedWeight:
        return drawn(generator, 4, inputs, 4, group, torch.float32, zeros=True, mixed=mixed)

    assert of(64, 16, mixed=False).inputs(12, 16) is None
    assert of(64, 16, mixed=True).inputs(0, 32) is None
    assert of(64, 64, mixed=False).inputs(3, 7) is not None
