"""Tests that all layers in one call give what the same kernels give call by call, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.engine.weights.adapters import AdaptedLayers, LayerPart
from alignedserve.kernels.common.adapters import AdapterPart, AdapterWeights, LayerAdapter, StepAdapters
from alignedserve.kernels.common.decoder import Angles, Decoder, DecoderLayer, Inner, Norm, Paged
from alignedserve.kernels.common.int8_kv import quantise_vectors
from alignedserve.kernels.common.linear import BUCKETS, LayerShape, Linear, Tuning, Way
from alignedserve.kernels.common.quantised import quantised
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.native.kernels import Native
from tests.kernels.every import PACKING, on_native_kernels
from tests.kernels.samples import DTYPES, ahead_of, packed, scratch_of, threads

BLOCK_SIZE, EPS = 4, 1e-5
WIDE = torch.float32


def call_by_call(
    kernels: Kernels, layers: Sequence[DecoderLayer], x: torch.Tensor, angles: Sequence[Angles], paged: Paged, way: Way
) -> None:
    rows = x.shape[0]
    for linear in linears(layers):
        linear.use(always(way, linear.shape))
    for layer, cache in zip(layers, paged.cache, strict=True):
        heads, kv_heads, width = layer.heads, layer.kv_heads, layer.head_dim
        qkv = layer.qkv(normed(kernels, x, layer.attention_norm)).view(rows, -1, width)
        query, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if layer.query_norm is not None and layer.k_norm is not None:
            query, k = kernels.rms_norm(query, layer.query_norm, EPS), kernels.rms_norm(k, layer.k_norm, EPS)
        if angles:
            kernels.rotate(query, *angles[layer.angles])
            kernels.rotate(k, *angles[layer.angles])
        kernels.write(cache, paged.spans, k.reshape(rows, -1), v.reshape(rows, -1))
        attended = kernels.attend(query, cache, paged.spans, layer.scoring)
        add(kernels, layer.out, layer.after_attention, attended.view(rows, -1), x)
        up = layer.up(normed(kernels, x, layer.mlp_norm))
        inner = {Inner.RELU: torch.relu, Inner.SILU: kernels.silu_mul, Inner.GELU: kernels.gelu_mul}[layer.inner](up)
        add(kernels, layer.down, layer.after_mlp, inner, x)


def add(kernels: Kernels, linear: Linear, after: Norm | None, rows: torch.Tensor, x: torch.Tensor) -> None:
    if after is None:
        linear.add_to(rows, x)
    else:
        x += normed(kernels, linear(rows), after)


def linears(layers: Sequence[DecoderLayer]) -> list[Linear]:
    return [linear for layer in layers for linear in (layer.qkv, layer.out, layer.up, layer.down)]


def always(way: Way, shape: LayerShape) -> Tuning:
    return Tuning({shape: (way,) * len(BUCKETS)})


def normed(kernels: Kernels, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    if norm.centred:
        return kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)
    assert norm.weight is not None
    return kernels.rms_norm(x, norm.weight, norm.eps)


def layers_of(
    kernels: Kernels,
    generator: torch.Generator,
    dtype: torch.dtype,
    llama: bool,
    head_norms: bool,
    turned: int,
    packable: bool = False,
    bits: int | None = None,
    gemma: bool = False,
    inner: int = 40,
) -> list[DecoderLayer]:
    """Return two layers with 4 heads of 8 numbers: as in Llama, grouped and gated, or as in OPT; with `bits`, their
    weights are quantised. As in Gemma 3: norms of what is added to x, weights of norms in fp32, gelu, two angles."""
    width, heads, kv_heads = 8, 4, 2 if llama else 4
    hidden = 24 if llama and not packable else 32

    def vector(size: int) -> torch.Tensor:
        return packed(generator, dtype, size)

    def norm() -> Norm:
        weight = vector(hidden)
        bias = None if llama else vector(hidden)
        return Norm(weight.to(WIDE) * 1.001 if gemma else weight, bias, EPS, centred=not llama)

    def linear(out: int, inputs: int) -> Linear:
        weight = packed(generator, dtype, out, inputs) / 4
        bias = None if llama else vector(out)
        if bits is None:
            return kernels.linear(weight, bias)
        return kernels.quantised(quantised(weight, bits, 8 if bits == 4 else inputs), bias, dtype)

    def head_norm() -> torch.Tensor | None:
        if not head_norms:
            return None
        return vector(width).to(WIDE) * 1.001 if gemma else vector(width)

    def layer(window: int | None, *changed: Any) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=norm(),
            qkv=linear((heads + 2 * kv_heads) * width, hidden),
            query_norm=head_norm(),
            k_norm=head_norm(),
            out=linear(hidden, heads * width),
            mlp_norm=norm(),
            up=linear(2 * inner if llama else inner, hidden),
            down=linear(hidden, inner),
            inner=Inner.GELU if gemma else Inner.SILU if llama else Inner.RELU,
            after_attention=norm() if gemma else None,
            after_mlp=norm() if gemma else None,
            angles=int(gemma and window is not None),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            turned=turned,
            scoring=Scoring(width**-0.5, window, *changed),
        )

    return [layer(None), layer(3, 5.0, torch.rand(heads))]


def rows_read(generator: torch.Generator, count: int, share: float | None) -> torch.Tensor | None:
    """Return some of the rows, one of them twice, or None for all."""
    if share is None:
        return None
    rows = torch.randperm(count, generator=generator)[: math.ceil(share * count)]
    return torch.cat((rows, rows[:1]))


def assert_near(x: torch.Tensor, expected: torch.Tensor) -> None:
    if len(x):
        assert (x.float() - expected.float()).abs().max() <= expected.float().abs().max() / 16


def paged_of(layers: Sequence[DecoderLayer], dtype: torch.dtype, lengths: Sequence[int]) -> Paged:
    """Return requests whose tokens all run in this step; places that no kernel writes are NaN."""
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    lies = [QuerySpan(length, length, range(sum(blocks[:i]), sum(blocks[: i + 1]))) for i, length in enumerate(lengths)]
    kv_dim = layers[0].kv_heads * layers[0].head_dim
    cache = torch.full((len(layers), 2 * sum(blocks), BLOCK_SIZE, kv_dim), float("nan"), dtype=dtype)
    return Paged(cache, Spans(lies, BLOCK_SIZE))


@contextmanager
def pauses_between_layers(decoder: Decoder) -> Iterator[None]:
    """Let a run pause between all layers."""
    num, pauses = 0, decoder.pauses
    assert pauses is not None

    def work() -> None:
        nonlocal num
        num += 1
        pauses.ask()

    pauses.work = work
    pauses.ask()
    yield
    pauses.work = lambda: None
    pauses.take()
    assert num == 1, "there are two layers"


@on_native_kernels
@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dtype=DTYPES,
    kind=st.sampled_from(["opt", "llama", "gemma"]),
    head_norms=st.booleans(),
    turned=st.sampled_from([0, 4, 8]),
    way=st.sampled_from([Way.NATIVE, Way.PACKED]),
    bits=st.sampled_from([None, 8, 4]),
    inner=st.sampled_from([48, 64, 192]),
    count=st.sampled_from([1, 2]),
    share_read=st.sampled_from([None, 0, 0.3, 1]),
    seed=st.integers(0, 1 << 30),
)
def test_one_call_is_all_calls(
    kernels: Native,
    lengths: list[int],
    dtype: torch.dtype,
    kind: str,
    head_norms: bool,
    turned: int,
    way: Way,
    bits: int | None,
    inner: int,
    count: int,
    share_read: float | None,
    seed: int,
) -> None:
    """Where only some rows are read, they are computed without those beside them, which may round otherwise."""
    if kernels.library.isa not in PACKING:
        way = Way.NATIVE
    generator = torch.Generator().manual_seed(seed)
    is_gated, packable = kind != "opt", way is Way.PACKED
    inner = inner if packable else 40
    layers = layers_of(kernels, generator, dtype, is_gated, head_norms, turned, packable, bits, kind == "gemma", inner)
    x = packed(generator, dtype, sum(lengths), layers[0].qkv.shape.inputs)
    drawn = torch.randn(1 + (kind == "gemma"), sum(lengths), turned // 2, generator=generator)
    angles = [(angle.cos(), angle.sin()) for angle in drawn] if turned else []
    decoder = kernels.decoder(layers)
    assert decoder is not None
    with threads(count):
        expected, into = x.clone(), paged_of(layers, dtype, lengths)
        call_by_call(kernels, layers, expected, angles, into, way)
        paged, again = paged_of(layers, dtype, lengths), x.clone()
        read = rows_read(generator, len(x), share_read)
        decoder.run(x, angles, paged, read)
        with pauses_between_layers(decoder):
            decoder.run(again, angles, paged_of(layers, dtype, lengths), read)
    assert expected.isfinite().all()
    if read is None:
        read = torch.arange(len(x))
        assert torch.equal(x, expected)
    else:
        assert_near(x[read], expected[read])
    assert torch.equal(again[read], x[read])
    assert torch.equal(paged.cache.nan_to_num(7.5), into.cache.nan_to_num(7.5))


@on_native_kernels
@pytest.mark.parametrize("count", [1, 2])
def test_a_long_prompt_is_all_calls(kernels: Native, count: int) -> None:
    """Its rows are divided among threads where there are enough of them."""
    way = Way.PACKED if kernels.library.isa in PACKING else Way.NATIVE
    generator, lengths = torch.Generator().manual_seed(2), [531]
    layers = layers_of(kernels, generator, torch.bfloat16, True, False, 8, packable=True, inner=192)
    x = packed(generator, torch.bfloat16, sum(lengths), 32)
    angle = torch.randn(len(x), 4, generator=generator)
    angles, expected = [(angle.cos(), angle.sin())], x.clone()
    decoder = kernels.decoder(layers)
    assert decoder is not None
    with threads(count):
        call_by_call(kernels, layers, expected, angles, paged_of(layers, x.dtype, lengths), way)
        decoder.run(x, angles, paged_of(layers, x.dtype, lengths))
    assert torch.equal(x, expected)


@on_native_kernels
@settings(deadline=None)
@given(
    decodes=st.lists(st.integers(40, 600), min_size=1, max_size=40),
    slices=st.sampled_from([1 << 10, 1 << 13, 3 << 16]),
    chunks=st.lists(st.tuples(st.integers(2, 90), st.integers(0, 100)), min_size=1, max_size=3),
    kept=st.sampled_from([torch.bfloat16, torch.int8]),
    kind=st.sampled_from(["opt", "llama", "gemma"]),
    alike=st.booleans(),
    flipped=st.booleans(),
    count=st.sampled_from([1, 2, 3]),
    share_read=st.sampled_from([None, 0, 0.3]),
    seed=st.integers(0, 1 << 30),
)
def test_long_decodes_beside_prompts_are_all_calls(
    kernels: Native,
    decodes: list[int],
    slices: int,
    chunks: list[tuple[int, int]],
    kept: torch.dtype,
    kind: str,
    alike: bool,
    flipped: bool,
    count: int,
    share_read: float | None,
    seed: int,
) -> None:
    """Such a step runs in two halves where layers are packed: their attention runs beside products."""
    generator = torch.Generator().manual_seed(seed)
    packs = kernels.library.isa in PACKING
    of_gemma, inner = kind == "gemma", 48 if packs else 40
    layers = layers_of(kernels, generator, torch.bfloat16, kind != "opt", False, 8, packs, gemma=of_gemma, inner=inner)
    runs = [(1, tokens) for tokens in decodes] + [(queries, queries + before) for queries, before in chunks]
    lies, blocks = [], 0
    for number, (queries, tokens) in enumerate(runs):
        own = [*range(blocks, blocks := blocks - (-tokens // BLOCK_SIZE))]
        if alike and 0 < number < len(decodes):  # decodes begin with the same blocks
            own = [*lies[0].blocks[: min(len(own), len(lies[0].blocks)) - 1], *own][: len(own)]
        lies.append(QuerySpan(queries, tokens, [~block for block in own] if flipped else own))
    spans, rows = Spans(lies, BLOCK_SIZE), sum(queries for queries, _ in runs)
    kv_dim = layers[0].kv_heads * layers[0].head_dim
    cache = torch.randn(2, 2 * blocks, BLOCK_SIZE, kv_dim, generator=generator).to(torch.bfloat16)
    if kept is torch.int8:
        cache = quantise_vectors(cache.flatten(0, 2), layers[0].kv_heads).view(2, 2 * blocks, BLOCK_SIZE, -1)
    x = packed(generator, torch.bfloat16, rows, layers[0].qkv.shape.inputs)
    drawn = torch.randn(1 + (kind == "gemma"), rows, 4, generator=generator)
    angles = [(angle.cos(), angle.sin()) for angle in drawn]
    decoder = kernels.decoder(layers)
    assert decoder is not None
    with threads(count), ahead_of(kernels, slices):
        expected, into = x.clone(), cache.clone()
        call_by_call(kernels, layers, expected, angles, Paged(into, spans), Way.PACKED if packs else Way.NATIVE)
        read = rows_read(generator, rows, share_read)
        again, into_again = x.clone(), cache.clone()
        decoder.run(x, angles, Paged(cache, spans), read)
        with pauses_between_layers(decoder):
            decoder.run(again, angles, Paged(into_again, spans), read)
    seen = slice(None) if read is None else read
    assert torch.equal(again[seen], x[seen])
    assert torch.equal(into_again.view(torch.uint8), cache.view(torch.uint8))
    assert torch.equal(cache[0], into[0])
    if read is not None:
        return assert_near(x[read], expected[read])
    if count == 1:  # no attention of decodes is divided among threads
        assert torch.equal(x[: len(decodes)], expected[: len(decodes)])
    # A chunk that is cut has fewer queries in a half, and may be computed row by row.
    return assert_near(x, expected)


@on_native_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("llama", [True, False])
def test_one_call_adds_what_adapters_add_call_by_call(kernels: Native, dtype: torch.dtype, llama: bool) -> None:
    generator, lengths = torch.Generator().manual_seed(5), [3, 1, 6, 2]
    layers = layers_of(kernels, generator, dtype, llama, False, 8 if llama else 0)
    adapted, shapes = AdaptedLayers(kernels.adapt), [linear.shape for linear in linears(layers)]
    for linear in linears(layers):
        adapted.add(linear, [LayerPart("", linear.shape.out)])

    def adapter(rank: int) -> AdapterWeights:
        def of_layer(out: int, inputs: int) -> LayerAdapter:
            b = packed(generator, dtype, out, rank) / 4
            return LayerAdapter(packed(generator, dtype, rank, inputs) / 4, (AdapterPart.from_matrix(b, 0, 0),))

        return AdapterWeights([of_layer(shape.out, shape.inputs) for shape in shapes])

    step = StepAdapters.from_rows({adapter(3): [0, 1, 2, 11], adapter(16): [3, 5, 6]})
    x = packed(generator, dtype, sum(lengths), layers[0].qkv.shape.inputs)
    angle = torch.randn(sum(lengths), 4, generator=generator)
    angles = [(angle.cos(), angle.sin())] if llama else []
    decoder = kernels.decoder(layers)
    assert decoder is not None
    expected, plain, paged = x.clone(), x.clone(), paged_of(layers, dtype, lengths)
    adapted.step = step
    call_by_call(kernels, layers, expected, angles, paged_of(layers, dtype, lengths), Way.NATIVE)
    decoder.run(plain, angles, paged_of(layers, dtype, lengths))
    # All rows run through all of the last layer: adapters know them by number.
    decoder.run(x, angles, replace(paged, adapters=step), torch.tensor([3]))
    assert torch.equal(x, expected)
    assert not torch.equal(x[0], plain[0])


@on_native_kernels
@pytest.mark.parametrize("count", [1, 2])
def test_a_long_request_that_is_divided_among_threads(kernels: Native, count: int) -> None:
    way = Way.PACKED if kernels.library.isa in PACKING else Way.NATIVE
    generator, dtype, tokens = torch.Generator().manual_seed(0), torch.bfloat16, 3000
    layers = layers_of(kernels, generator, dtype, True, False, 8, packable=True, inner=48)
    cache = torch.randn(2, 2 * tokens // BLOCK_SIZE, BLOCK_SIZE, 16, generator=generator).to(dtype)
    spans = Spans([QuerySpan(1, tokens, range(tokens // BLOCK_SIZE))], BLOCK_SIZE)
    x = packed(generator, dtype, 1, 32)
    angle = torch.randn(1, 4, generator=generator)
    angles = [(angle.cos(), angle.sin())]
    decoder = kernels.decoder(layers)
    assert decoder is not None
    with threads(count):
        expected, into = x.clone(), cache.clone()
        call_by_call(kernels, layers, expected, angles, Paged(into, spans), way)
        with scratch_of(kernels, 100), pytest.raises(MemoryError, match="no memory for what the kernel decoder"):
            decoder.run(x.clone(), angles, Paged(cache.clone(), spans))
        decoder.run(x, angles, Paged(cache, spans))
    assert torch.equal(x, expected)
    assert torch.equal(cache, into)


@on_native_kernels
@pytest.mark.parametrize("count", [1, 2])
def test_too_little_memory_for_decodes_beside_prompts_leaves_nothing_behind(kernels: Native, count: int) -> None:
    way = Way.PACKED if kernels.library.isa in PACKING else Way.NATIVE
    generator = torch.Generator().manual_seed(0)
    layers = layers_of(kernels, generator, torch.bfloat16, True, False, 8, packable=True, inner=48)
    for linear in linears(layers):
        linear.use(always(way, linear.shape))
    lies = [QuerySpan(1, 400, range(100)), QuerySpan(1, 300, range(100, 175)), QuerySpan(90, 90, range(175, 198))]
    cache = torch.randn(2, 2 * 198, BLOCK_SIZE, 16, generator=generator).to(torch.bfloat16)
    spans, x = Spans(lies, BLOCK_SIZE), packed(generator, torch.bfloat16, 92, 32)
    angle = torch.randn(92, 4, generator=generator)
    decoder = kernels.decoder(layers)
    assert decoder is not None

    def run() -> torch.Tensor:
        out = x.clone()
        decoder.run(out, [(angle.cos(), angle.sin())], Paged(cache.clone(), spans))
        return out

    with threads(count), ahead_of(kernels, 1 << 10):
        expected = run()
        num_failed = 0
        for bits in range(6, 18):
            with scratch_of(kernels, 1 << bits):
                try:
                    run()
                except MemoryError:
                    num_failed += 1
            assert torch.equal(run(), expected)
    assert 0 < num_failed < 12


@on_native_kernels
def test_it_takes_as_many_rows_as_are_fastest_so(kernels: Native) -> None:
    layers = layers_of(kernels, torch.Generator().manual_seed(0), torch.float32, True, False, 8)
    decoder = kernels.decoder(layers)
    assert decoder is not None
    for linear in linears(layers):
        linear.use(always(Way.NATIVE, linear.shape))
    assert decoder.takes(100_000)
    ways = (Way.NATIVE,) * BUCKETS.index(32) + (Way.TORCH,) + (Way.NATIVE,) * (len(BUCKETS) - BUCKETS.index(32) - 1)
    layers[1].down.use(Tuning({layers[1].down.shape: ways}))
    assert decoder.takes(16)
    assert not decoder.takes(17)
    layers[0].up.use(Tuning({layers[0].up.shape: (Way.TORCH,) * len(BUCKETS)}))
    assert not decoder.takes(1)


@on_native_kernels
def test_what_does_not_fit_is_refused(kernels: Native) -> None:
    layers = layers_of(kernels, torch.Generator().manual_seed(0), torch.float32, True, False, 8)
    decoder = kernels.decoder(layers)
    assert decoder is not None
    paged, x, angles = paged_of(layers, torch.float32, [3]), torch.zeros(3, 24), [(torch.zeros(3, 4),) * 2]
    bad_x = [torch.zeros(2, 24), torch.zeros(3, 25), torch.zeros(24, 3).t()]
    bad_angles: list[list[Angles]] = [[], [(torch.zeros(3, 4), torch.zeros(3, 5))], [(torch.zeros(3, 4).double(),) * 2]]
    for wrong_x in bad_x:
        with pytest.raises(ValueError, match="rows of 24"):
            decoder.run(wrong_x, angles, paged)
    for wrong_angles in bad_angles:
        with pytest.raises(ValueError, match="cosines and sines"):
            decoder.run(x, wrong_angles, paged)
    with pytest.raises(ValueError, match="2 layers"):
        decoder.run(x, angles, replace(paged, cache=paged.cache[:1]))
    with pytest.raises(TypeError, match="bfloat16"):
        decoder.run(x.bfloat16(), angles, paged)


def test_the_reference_has_none() -> None:
    layers = layers_of(Reference(), torch.Generator().manual_seed(0), torch.float32, True, False, 8)
    assert Reference().decoder(layers) is None


@on_native_kernels
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_layers_run_so_at_any_number_of_rows(kernels: Native, bits: int) -> None:
    layers = layers_of(kernels, torch.Generator().manual_seed(0), torch.bfloat16, True, False, 8, bits=bits)
    decoder = kernels.decoder(layers)
    assert decoder is not None
    assert decoder.takes(100_000)


@on_native_kernels
def test_there_is_none_for_dtypes_without_kernels(kernels: Native) -> None:
    layers = layers_of(kernels, torch.Generator().manual_seed(0), torch.float64, True, False, 8)
    assert kernels.decoder(layers) is None
