"""Tests of int8 per channel: every finite number comes back within half a step, and NaN is never hidden."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import Kernels
from tests.kernels.every import on_all_kernels, on_native_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantised(kernels: Kernels, rows: torch.Tensor) -> Quantised:
    groups, tokens, channels = rows.shape
    q = torch.full((groups, tokens, channels), 77, dtype=torch.uint8)
    least, step = torch.full((2, groups, channels), math.nan)
    kernels.quantise(rows, q, least, step)
    return q, least, step


def back(kernels: Kernels, of: Quantised, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(of[0].shape, math.nan, dtype=dtype)
    kernels.dequantise(*of, out)
    return out


@st.composite
def numbers(draw: st.DrawFn) -> torch.Tensor:
    """Draw [groups, tokens, channels] of all sizes: whole channels of one size each, and arbitrary numbers among
    them."""
    shape = draw(st.integers(1, 2)), draw(st.integers(1, 9)), draw(st.sampled_from([1, 7, 16, 17, 33, 530]))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    largest = math.log2(torch.finfo(dtype).max)
    sizes = 2 ** (torch.rand(shape[0], 1, shape[2], generator=generator, dtype=torch.double) * (largest + 150) - 150)
    shift = torch.randint(-1, 2, (shape[0], 1, shape[2]), generator=generator) * sizes
    rows = torch.randn(shape, generator=generator, dtype=torch.double) * sizes * 0.2 + shift * 0.3
    rows[..., :: draw(st.integers(2, 9))] = draw(finite(dtype))
    for _ in range(draw(st.integers(0, 4))):
        rows[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1)), 0] = draw(finite(dtype))
    return rows.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def finite(dtype: torch.dtype) -> st.SearchStrategy[float]:
    most = torch.finfo(dtype).max
    special = st.sampled_from([0.0, -0.0, most, -most, 3e38, -3e38, 1e-45, -1e-45, 1e-40, torch.finfo(dtype).tiny])
    return special.filter(lambda number: abs(number) <= most) | st.floats(-most, most, allow_nan=False)


@on_all_kernels
@given(rows=numbers())
@settings(deadline=None)
def test_what_comes_back_is_half_a_step_away_at_most(kernels: Kernels, rows: torch.Tensor) -> None:
    of = quantised(kernels, rows)
    exact = rows.double()
    least, most = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True)
    assert torch.equal(of[1].double(), least[:, 0])
    rounding = 2.0**-22 * torch.maximum(least.abs(), most.abs()) + 2.0**-141
    away = (back(kernels, of).double() - exact).abs()
    assert bool((away <= (most - least) / 255 * (0.5 + 2.0**-14) + rounding).all())


@on_all_kernels
@given(rows=numbers())
@settings(deadline=None)
def test_a_constant_channel_and_every_least_number_come_back_as_they_were(kernels: Kernels, rows: torch.Tensor) -> None:
    least = rows.amin(1, keepdim=True)
    of = quantised(kernels, least.expand(rows.shape).contiguous())
    assert not of[0].any()
    assert not of[2].any()
    assert torch.equal(back(kernels, of, rows.dtype), least.expand(rows.shape))
    returned = back(kernels, quantised(kernels, rows), rows.dtype)
    assert torch.equal(returned[rows == least], rows[rows == least])


@on_native_kernels
@given(rows=numbers())
@settings(deadline=None)
def test_results_are_the_reference_s_bit_by_bit(kernels: Kernels, rows: torch.Tensor) -> None:
    own, meant = quantised(kernels, rows), quantised(Reference(), rows)
    assert all(torch.equal(mine, expected) for mine, expected in zip(own, meant, strict=True))
    for dtype in DTYPES:
        assert torch.equal(back(kernels, own, dtype), back(Reference(), own, dtype))


@on_all_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_reported_wherever_it_is(
    kernels: Kernels, odd: float, dtype: torch.dtype
) -> None:
    for group, token, channel in [(0, 0, 0), (1, 4, 0), (0, 4, 16), (1, 2, 529), (0, 0, 511), (1, 3, 512)]:
        rows = torch.randn(2, 5, 530).to(dtype)
        rows[group, token, channel] = odd
        assert not quantised(kernels, rows)[2][group, channel].isfinite()


@on_all_kernels
def test_a_page_of_a_real_size_with_strided_rows(kernels: Kernels) -> None:
    """The kernel runs in threads, and has more channels than it reads together."""
    wide = torch.randn(6, 64, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = wide[:, :, 100:868]
    of = quantised(kernels, rows)
    assert all(map(torch.equal, of, quantised(kernels, rows.contiguous())))
    out = torch.full_like(wide, 5)
    kernels.dequantise(*of, out[:, :, 100:868])
    assert torch.equal(out[:, :, 100:868], back(kernels, of, torch.bfloat16))
    assert bool((out[:, :, :100] == 5).all())
    assert bool((out[:, :, 868:] == 5).all())


@on_native_kernels
def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    rows, (q, least, step) = torch.zeros(2, 3, 4), quantised(kernels, torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="of the rows' shape"):
        kernels.quantise(rows, q[:1], least, step)
    with pytest.raises(ValueError, match="fp32"):
        kernels.quantise(rows, q, least.double(), step)
    with pytest.raises(ValueError, match=r"\[groups, channels\]"):
        kernels.dequantise(q, least[:1], step, rows)
    with pytest.raises(ValueError, match="at least one token"):
        kernels.quantise(rows[:, :0], q[:, :0], least, step)
