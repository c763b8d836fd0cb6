"""Tests that weights packed in place give the same results as other weights, and can be unpacked unchanged."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.linear import BUCKETS, LayerShape, Linear, Tuning, Way
from alignedserve.kernels.dispatch.tuning import tune
from alignedserve.kernels.library import Library
from tests.kernels.every import PACKING
from tests.kernels.samples import packed, rounding, strided, threads

BF16 = torch.bfloat16
ALWAYS_PACKED = (Way.PACKED,) * len(BUCKETS)
OUTS = st.integers(1, 13).map(lambda vectors: 16 * vectors)
INPUTS = st.integers(1, 150).map(lambda pairs: 2 * pairs)


PACKED_ON = PACKING[-1] if PACKING else ""
needs_packing = pytest.mark.skipif(not PACKING, reason="no kernel for packed weights: it takes AVX512-bf16")


def made(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    linear = Linear(weight.clone(), bias, Library(PACKED_ON))
    linear.use(Tuning({linear.shape: ALWAYS_PACKED}))
    assert linear.packed
    return linear


@needs_packing
@settings(deadline=None)
@given(
    rows=st.integers(1, 130),
    inputs=INPUTS,
    out=OUTS,
    with_bias=st.booleans(),
    into=st.sampled_from(["rounded", "added", "wide"]),
    apart=st.booleans(),
    count=st.sampled_from([1, 3]),
    seed=st.integers(0, 1 << 30),
)
def test_is_the_product_rounded_once(
    rows: int, inputs: int, out: int, with_bias: bool, into: str, apart: bool, count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (strided if apart else packed)(generator, BF16, rows, inputs)
    weight = packed(generator, BF16, out, inputs)
    bias = packed(generator, BF16, out) if with_bias else None
    linear = made(weight, bias)
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    with threads(count):
        if into == "added":
            y = packed(generator, BF16, rows, out)
            exact, magnitude = exact + y.double(), magnitude + y.double().abs()
            linear.add_to(x, y)
        else:
            y = linear(x) if into == "rounded" else linear.wide(x)
    assert y.dtype is (torch.float32 if into == "wide" else BF16)
    allowed = rounding(y.dtype) * exact.abs() + 1e-5 * magnitude + 1e-7
    assert bool(((y.double() - exact).abs() <= allowed).all())


@needs_packing
@settings(deadline=None)
@given(inputs=INPUTS, out=OUTS, seed=st.integers(0, 1 << 30))
def test_other_kernels_read_the_weight_as_it_was_and_it_comes_back(inputs: int, out: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = packed(generator, BF16, out, inputs)
    linear = made(weight)
    assert torch.equal(linear.weight, weight)
    tokens = torch.randint(0, out, (7,), generator=generator)
    assert torch.equal(linear.rows(tokens), F.embedding(tokens, weight))
    linear.use(Tuning())
    assert not linear.packed
    assert torch.equal(linear.memory, weight)
    assert torch.equal(linear.rows(tokens), F.embedding(tokens, weight))


@needs_packing
@pytest.mark.parametrize("first", [64, 96])
def test_a_layer_of_its_lower_outputs_is_the_lower_part_of_the_layer(first: int) -> None:
    generator = torch.Generator().manual_seed(first)
    linear = made(packed(generator, BF16, 160, 34), packed(generator, BF16, 160))
    x = packed(generator, BF16, 5, 34)
    below = linear.below(first)
    assert below.packed == (first == 64), "it is packed where it begins with a panel"
    torch.testing.assert_close(below(x), linear(x)[:, first:], rtol=2 * rounding(BF16), atol=1e-2)
    linear.use(Tuning())
    torch.testing.assert_close(linear.below(first)(x), linear(x)[:, first:], rtol=2 * rounding(BF16), atol=1e-2)


@needs_packing
@pytest.mark.parametrize("rows", [1, 5, 40, 300, 700])
def test_the_number_of_threads_changes_nothing(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    linear = made(packed(generator, BF16, 208, 96), packed(generator, BF16, 208))
    x = packed(generator, BF16, rows, 96)
    with threads(1):
        alone = linear(x)
    with threads(3):
        assert torch.equal(linear(x), alone)


@needs_packing
def test_more_rows_than_stay_in_the_second_cache() -> None:
    """Weights are then multiplied with some rows after the others; only the last tile of rows is not whole."""
    generator = torch.Generator().manual_seed(7)
    x, weight = packed(generator, BF16, 101, 9000), packed(generator, BF16, 16, 9000)
    with threads(2):
        found = made(weight).wide(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-2)


@needs_packing
def test_no_rows_give_no_rows() -> None:
    assert made(torch.ones(80, 6, dtype=BF16))(torch.empty(0, 6, dtype=BF16)).shape == (0, 80)


@needs_packing
def test_a_row_that_is_no_number_spoils_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = made(packed(generator, BF16, 80, 100))
    for rows in (2, 7, 40):
        x = packed(generator, BF16, rows, 100)
        clean = linear(x)
        x[1] = float("nan")
        spoilt = linear(x)
        assert spoilt[1].isnan().all()
        clean_rows = [row for row in range(rows) if row != 1]
        assert torch.equal(spoilt[clean_rows], clean[clean_rows])


@needs_packing
@pytest.mark.parametrize(("out", "inputs", "dtype"), [(24, 8, BF16), (32, 7, BF16), (32, 8, torch.float16)])
def test_what_cannot_be_packed_stays_as_it_is(out: int, inputs: int, dtype: torch.dtype) -> None:
    weight = packed(torch.Generator().manual_seed(1), dtype, out, inputs)
    linear = Linear(weight.clone(), None, Library(PACKED_ON))
    linear.use(Tuning({linear.shape: ALWAYS_PACKED}))
    assert not linear.packed
    assert torch.equal(linear.memory, weight)
    x = torch.ones(3, inputs, dtype=dtype)
    torch.testing.assert_close(linear(x), F.linear(x, weight), rtol=2e-2, atol=2e-2)


@needs_packing
@pytest.mark.parametrize("shared", [False, True])
def test_tuning_packs_what_nobody_else_reads(shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(2)
    weights = [packed(generator, BF16, out, 64) for out in (32, 320, 32)]
    layers = [Linear(weight.clone(), None, Library(PACKED_ON)) for weight in weights]
    layers[2].shared = shared
    with caplog.at_level(logging.INFO, "alignedserve.kernels"):
        tuning = tune(layers, seconds=0.01)
    assert [layer.packed for layer in layers] == [not shared, True, not shared]
    assert (tuning.ways[LayerShape(32, 64, BF16)] == ALWAYS_PACKED) != shared
    assert ("32x64 bfloat16: packed" in caplog.text) != shared
    x = packed(generator, BF16, 9, 64)
    for layer, weight in zip(layers, weights, strict=True):
        torch.testing.assert_close(layer(x), F.linear(x, weight), rtol=2 * rounding(BF16), atol=1e-2)


@needs_packing
def test_tuning_measures_the_ways_of_a_layer_whose_last_outputs_fill_no_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.kernels.dispatch.tuning._BYTES", 1 << 15)  # a part of 256 outputs
    monkeypatch.setattr("alignedserve.kernels.dispatch.tuning._fastest", lambda *_: Way.TORCH)
    layer = Linear(packed(torch.Generator().manual_seed(4), BF16, 264, 64), None, Library(PACKED_ON))
    assert tune([layer]).ways == {layer.shape: (Way.TORCH,) * len(BUCKETS)}
    assert layer.native_to == 0


@needs_packing
def test_measuring_leaves_the_weight_as_it_says() -> None:
    weight = packed(torch.Generator().manual_seed(3), BF16, 512, 256)
    layer = Linear(weight.clone(), None, Library(PACKED_ON))
    tuning = tune([layer], seconds=0.05)
    assert set(tuning.ways) == {layer.shape}
    assert layer.packed == (tuning.ways[layer.shape] == ALWAYS_PACKED)
    assert torch.equal(layer.weight, weight)
