"""Tests that linear layers give the product of their inputs and weights, whichever implementation runs."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.linear import BUCKETS, LayerShape, Linear, Tuning, Way
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.dispatch.tuning import tune
from alignedserve.kernels.library import Library
from tests.kernels.every import native_sets, on_native_kernels
from tests.kernels.samples import DTYPES, packed, rounding, strided, threads

ALWAYS_NATIVE = (Way.NATIVE,) * len(BUCKETS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: results do not depend on the number (a test below shows it), and threads may disturb other
    tests."""
    with threads(1):
        yield


def test_the_library_was_built() -> None:
    if not native_sets() and not os.environ.get("CI"):
        pytest.skip("the C++ kernels were not built: python -m alignedserve.kernels.build")
    assert native_sets()


def native(weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
    linear = kernels.linear(weight, bias)
    linear.use(Tuning({linear.shape: ALWAYS_NATIVE}))
    return linear


@on_native_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_rows_than_stay_in_the_second_cache(kernels: Kernels, dtype: torch.dtype) -> None:
    """Weights are then multiplied with some rows after the others."""
    generator = torch.Generator().manual_seed(7)
    x, weight = packed(generator, dtype, 101, 9000), packed(generator, dtype, 9, 9000)
    with threads(2):
        found = native(weight, None, kernels).wide(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-2)


@on_native_kernels
@settings(deadline=None)
@given(
    rows=st.integers(1, 130),
    inputs=st.integers(1, 300),
    out=st.integers(1, 140),
    dtype=DTYPES,
    with_bias=st.booleans(),
    into=st.sampled_from(["rounded", "added", "wide"]),
    apart=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_is_the_product_rounded_once(
    kernels: Kernels,
    rows: int,
    inputs: int,
    out: int,
    dtype: torch.dtype,
    with_bias: bool,
    into: str,
    apart: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (strided if apart else packed)(generator, dtype, rows, inputs)
    weight = packed(generator, dtype, out, inputs)
    bias = packed(generator, dtype, out) if with_bias else None
    linear = native(weight, bias, kernels)
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    if into == "added":
        y = packed(generator, dtype, rows, out)
        exact, magnitude = exact + y.double(), magnitude + y.double().abs()
        linear.add_to(x, y)
    else:
        y = linear(x) if into == "rounded" else linear.wide(x)
    assert y.dtype is (torch.float32 if into == "wide" else dtype)
    allowed = rounding(y.dtype) * exact.abs() + 1e-5 * magnitude + 1e-7
    assert bool(((y.double() - exact).abs() <= allowed).all())


@on_native_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_no_number_spoils_no_other(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = packed(generator, dtype, 50, 100)
    linear = native(weight, None, kernels)
    for rows in (2, 7, 40):
        x = packed(generator, dtype, rows, 100)
        clean = linear(x)
        x[1] = float("nan")
        spoilt = linear(x)
        assert spoilt[1].isnan().all()
        clean_rows = [row for row in range(rows) if row != 1]
        assert torch.equal(spoilt[clean_rows], clean[clean_rows])


@on_native_kernels
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
def test_the_number_of_threads_changes_nothing(kernels: Kernels, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    for dtype in (torch.float32, torch.bfloat16):
        linear = native(packed(generator, dtype, 200, 96), packed(generator, dtype, 200), kernels)
        x = packed(generator, dtype, rows, 96)
        alone = linear(x)
        with threads(3):
            assert torch.equal(linear(x), alone)


@on_native_kernels
def test_no_rows_give_no_rows(kernels: Kernels) -> None:
    linear = native(torch.ones(3, 5), None, kernels)
    assert linear(torch.empty(0, 5)).shape == (0, 3)


@on_native_kernels
def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    linear = native(torch.ones(3, 5), None, kernels)
    with pytest.raises(ValueError, match=r"rows of 4 torch\.float32 do not fit a layer of 5"):
        linear(torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"rows of 5 torch\.bfloat16"):
        linear(torch.ones(1, 5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="the residual is"):
        linear.add_to(torch.ones(2, 5), torch.ones(2, 4))


def test_a_layer_goes_the_way_it_is_told() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = packed(generator, torch.bfloat16, 64, 96), packed(generator, torch.bfloat16, 64)
    linear = Linear(weight, bias, Library() if native_sets() else None)
    linear.use(Tuning({LayerShape(64, 96, torch.bfloat16): (Way.TORCH,) * len(BUCKETS)}))
    for rows in (1, 64, 700):
        x = packed(generator, torch.bfloat16, rows, 96)
        assert torch.equal(linear(x), F.linear(x, weight, bias))


def test_torch_adds_to_the_residual_too() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = packed(generator, torch.float32, 8, 16), packed(generator, torch.float32, 8)
    x = packed(generator, torch.float32, 5, 16)
    for linear, expected in ((Linear(weight), F.linear(x, weight)), (Linear(weight, bias), F.linear(x, weight, bias))):
        residual = torch.ones(5, 8)
        linear.add_to(x, residual)
        torch.testing.assert_close(residual, expected + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tuning_names_a_way_there_is_for_every_shape_and_number_of_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    library = Library() if native_sets() else None
    layers = [Linear(packed(generator, dtype, out, 64), None, library) for out in (32, 320, 32)]
    tuning = tune(layers, seconds=0.01)
    assert set(tuning.ways) == {LayerShape(32, 64, dtype), LayerShape(320, 64, dtype)}
    for ways in tuning.ways.values():
        assert len(ways) == len(BUCKETS)
        assert set(ways) <= {*layers[0].ways, Way.PACKED}
    x = packed(generator, dtype, 9, 64)
    torch.testing.assert_close(layers[0](x), F.linear(x, layers[0].weight), rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not native_sets(), reason="the C++ library was not built")
@pytest.mark.parametrize("ours", range(len(BUCKETS) + 1))
def test_where_torch_becomes_faster_is_found_without_measuring_all(ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def fastest(_: Linear, rows: int, seconds: float) -> Way:
        measured.append(seconds)
        return Way.NATIVE if BUCKETS.index(rows) < ours else Way.TORCH

    monkeypatch.setattr("alignedserve.kernels.dispatch.tuning._fastest", fastest)
    layer = Linear(torch.ones(32, 64), None, Library())
    tuning = tune([layer], seconds=1.0)
    assert tuning.ways[layer.shape] == (Way.NATIVE,) * ours + (Way.TORCH,) * (len(BUCKETS) - ours)
    assert len(measured) <= 4
    assert sum(measured) <= 1.0


def test_tuning_ends_when_it_knows_enough_however_much_time_it_may_take() -> None:
    layer = Linear(torch.ones(32, 64), None, Library() if native_sets() else None)
    assert set(tune([layer], seconds=math.inf).ways) == {layer.shape}


def test_of_nothing_there_is_nothing_to_tune(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "alignedserve.kernels"):
        assert tune([]) == Tuning()
    assert not caplog.messages


def test_a_tuning_reads_as_a_line() -> None:
    ways = (*(Way.TORCH,) * 2, *(Way.NATIVE,) * 5, *(Way.TORCH,) * 3)
    tuning = Tuning({LayerShape(6, 4, torch.bfloat16): ways, LayerShape(4, 6, torch.float32): ALWAYS_NATIVE})
    assert str(tuning) == "6x4 bfloat16: torch to 2 rows, native to 64 rows, torch above; 4x6 float32: native"
