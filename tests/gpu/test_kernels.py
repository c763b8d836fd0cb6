"""Tests of the compiled Triton kernels against the reference on the CPU in fp32."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.engine.forms.int8_pages import Int8Pages
from alignedserve.engine.graphs import CudaCapture
from alignedserve.kernels.common.decoder import Heads
from alignedserve.kernels.common.int8_kv import quantise_vectors
from alignedserve.kernels.common.placing import StepMemory
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import LongChunks, QuerySpan, Spans, StaticSpans, StepSize
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.kernels.dispatch.paged_attention import LONG_CHUNK, Fastest, PagedKernels
from alignedserve.kernels.dispatch.paged_libraries import PAGE
from alignedserve.kernels.dispatch.probing import working_libraries
from tests.gpu.cases import GPU, SOAK, compressed, random_step

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OFF = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.003}  # absolute error of numbers of about 1
REFERENCE = Reference()
pytestmark = pytest.mark.usefixtures("unmeasured", "by_triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel_works_here(dtype: torch.dtype) -> None:
    chosen = choose(GPU, dtype)
    assert chosen.kernels.name.startswith("Triton")
    assert " all work" in chosen.why, chosen.why


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(30 if SOAK else 8))
def test_any_step_attends_as_the_reference_does(seed: int, dtype: torch.dtype) -> None:
    step, kernels = random_step(seed, dtype), choose(GPU, dtype).kernels
    scale = step.query.shape[-1] ** -0.5
    cache = step.cache.to(GPU)
    kernels.write(cache, step.spans, step.k.to(GPU), step.v.to(GPU))
    REFERENCE.write(step.cache, step.spans, step.k, step.v)
    assert torch.equal(cache.cpu().nan_to_num(), step.cache.nan_to_num())
    assert torch.equal(cache.cpu().isnan(), step.cache.isnan())
    got = kernels.attend(step.query.to(GPU), cache, step.spans, Scoring(scale, step.window))
    wide = replace(step, cache=step.cache.float(), query=step.query.float())
    expected = REFERENCE.attend(wide.query, wide.cache, step.spans, Scoring(scale, step.window))
    torch.testing.assert_close(got.float().cpu(), expected, rtol=0, atol=2 * OFF[dtype])


@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("tokens", [1, 1000, 9000])
def test_new_tokens_are_written_before_they_are_read(tokens: int, in_int8: bool) -> None:
    """The place of a new token is NaN before: whoever reads it too early shows it."""
    kernels, blocks, scoring = choose(GPU, torch.bfloat16).kernels, -(-tokens // 16), Scoring(0.1)
    spans = Spans([QuerySpan(1, tokens, range(blocks)), QuerySpan(1, 33, range(blocks, blocks + 3))], 16)
    cache = torch.randn(2 * blocks + 6, 16, 1024).bfloat16()
    if in_int8:
        cache = quantise_vectors(cache.flatten(0, 1), 8).view(len(cache), 16, -1)
    cache.view(torch.uint8).flatten(0, 1)[torch.cat((spans.new_slots, spans.new_slots + 16))] = 0xFF
    cache, heads = cache.to(GPU), Heads(32, 8, 128)
    for seed in range(100):
        drawn = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed)).to(GPU)
        qkv, its, other = torch.randn(2, 6144, device=GPU).bfloat16(), cache.clone(), cache.clone()
        got = kernels.attend_new(its, spans, qkv, heads, (drawn.cos(), drawn.sin()), scoring)
        assert got is not None
        query = kernels.rotate_and_write(other, spans, qkv, heads, (drawn.cos(), drawn.sin()))
        assert torch.equal(its.view(torch.uint8), other.view(torch.uint8))
        torch.testing.assert_close(got, kernels.attend(query, other, spans, scoring), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("tokens", [1000, 9000])
def test_parts_are_merged_when_all_are_there(tokens: int) -> None:
    """The same spans serve many launches, as the layers of a step do: each finds the counters at zero."""
    kernels, blocks = choose(GPU, torch.bfloat16).kernels, -(-tokens // 16)
    spans = Spans(
        [QuerySpan(1, tokens, range(blocks)), QuerySpan(1, 40, range(3)), QuerySpan(40, tokens, range(blocks))], 16
    )
    query, cache = torch.randn(42, 32, 128), torch.randn(2 * blocks, 16, 1024)
    query, cache = query.to(GPU, torch.bfloat16), cache.to(GPU, torch.bfloat16)
    first = kernels.attend(query, cache, spans, Scoring(0.1))
    for _ in range(300):
        assert torch.equal(kernels.attend(query, cache, spans, Scoring(0.1)), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_scores", ["capped", "with sinks", "in stretches", "all"])
@pytest.mark.parametrize("seed", [7, 9])  # long and short requests, chunks and decodes, with a window and without
def test_scores_are_changed_as_the_reference_changes_them(seed: int, of_scores: str, dtype: torch.dtype) -> None:
    """Scores have both signs, and lie about 0 and far beyond the cap."""
    step, kernels = random_step(seed, dtype), choose(GPU, dtype).kernels
    heads, head_dim = step.query.shape[1:]
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(1))
    changes: dict[str, dict[str, Any]] = {
        "capped": {"softcap": 2.0},
        "with sinks": {"sinks": sinks},
        "in stretches": {"stretch": 70},
    }
    changes["all"] = {name: value for change in changes.values() for name, value in change.items()}
    scoring = Scoring(4 * head_dim**-0.5, step.window, **changes[of_scores])
    cache = step.cache.to(GPU)
    kernels.write(cache, step.spans, step.k.to(GPU), step.v.to(GPU))
    REFERENCE.write(step.cache, step.spans, step.k, step.v)
    on_gpu = replace(scoring, **{name: value.to(GPU) for name, value in changes[of_scores].items() if name == "sinks"})
    got = kernels.attend(step.query.to(GPU), cache, step.spans, on_gpu)
    expected = REFERENCE.attend(step.query.float(), step.cache.float(), step.spans, scoring)
    torch.testing.assert_close(got.float().cpu(), expected, rtol=0, atol=4 * OFF[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vectors_go_to_a_page_and_back_bit_by_bit(dtype: torch.dtype) -> None:
    kernels, cache = choose(GPU, dtype).kernels, torch.randn(3, 8, 16, 128).to(GPU, dtype)
    slots = torch.tensor([5, 4, 3, 40, 66, 98])
    page, expected = torch.zeros(3, 2, 9, 128, dtype=dtype), torch.zeros(3, 2, 9, 128, dtype=dtype)
    kernels.gather(cache, slots, page[:, :, :6])
    REFERENCE.gather(cache.cpu(), slots, expected[:, :, :6])
    assert torch.equal(page, expected)
    back = torch.zeros_like(cache)
    kernels.scatter(back, slots, page[:, :, :6])
    again = torch.zeros_like(page)
    kernels.gather(back, slots, again[:, :, :6])
    assert torch.equal(again, page)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_what_the_reference_makes_of_it(dtype: torch.dtype) -> None:
    rows, kernels = torch.randn(4, 64, 1024).to(dtype), choose(GPU, dtype).kernels
    levels = (torch.empty(rows.shape, dtype=torch.uint8), torch.empty(4, 1024), torch.empty(4, 1024))
    on_gpu = tuple(tensor.to(GPU) for tensor in levels)
    REFERENCE.quantise(rows, *levels)
    kernels.quantise(rows.to(GPU), *on_gpu)
    assert (on_gpu[0].cpu().int() - levels[0].int()).abs().max() <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_page_of_int8_is_expanded_into_the_blocks(dtype: torch.dtype) -> None:
    """The page is compressed and expanded on the GPU; the result is that of the CPU, or a level of its channel off."""
    kernels, slots = choose(GPU, dtype).kernels, torch.arange(64, 128)
    rows = torch.randn(8, 64, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[1, :, 3] *= 1e4  # fp16 cannot hold what this channel needs
    told = []
    for device, of_device in ((GPU, kernels), (torch.device("cpu"), REFERENCE)):
        pages = Int8Pages(8, 64, 1024, dtype, of_device, device)
        payload, cache = memoryview(bytearray(pages.layout.size)), torch.zeros(4, 4, 64, 1024, device=device).to(dtype)
        assert compressed(pages, rows, payload)
        for piece, expand in pages.pieces(payload, cache, slots + 64, 1 << 18):  # the K of block 1
            expand(piece.to(device))
        torch.cuda.synchronize()
        told.append(cache.cpu())
    got, expected = (cache.float().unflatten(1, (2, 2)) for cache in told)
    wide = rows.float().unflatten(0, (4, 2))  # K and V of each layer
    level = (wide.amax(2, keepdim=True) - wide.amin(2, keepdim=True)) / 255
    assert torch.equal(got[:, 0], expected[:, 0]), "of block 0 nothing is written"
    assert bool(((got[:, 1] - expected[:, 1]).abs() <= level + 0.01 * expected[:, 1].abs()).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page", [16, PAGE])
def test_others_attention_is_right_where_it_is_used(dtype: torch.dtype, window: int | None, page: int) -> None:
    """Compare each library on this machine with the reference: blocks of this size, all filled from the left."""
    working, why_not = working_libraries(GPU, dtype, page)
    if not working:
        pytest.skip(f"none is here: {'; '.join(why_not)}")
    lengths = ((1, 300), (20, 270), (1, 5), (3, 600), (1, 512), (1, 4000))
    counts = [-(-tokens // page) for _, tokens in lengths]
    blocks = random.Random(0).sample(range(sum(counts)), sum(counts))
    lies = [
        QuerySpan(n, tokens, tuple(blocks.pop() for _ in range(c)))
        for (n, tokens), c in zip(lengths, counts, strict=True)
    ]
    spans = Spans(lies, page)
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2 * sum(counts), page, 4 * 64, generator=generator).to(dtype)
    query = torch.randn(spans.num_rows, 8, 64, generator=generator).to(dtype)
    expected = REFERENCE.attend(query.float(), cache.float(), spans, Scoring(0.125, window))
    for library in working:
        for fastest in (_Always(library.name), _Always("Triton")):
            got = PagedKernels([library], fastest, long_chunk=0).attend(
                query.to(GPU), cache.to(GPU), spans, Scoring(0.125, window)
            )
            torch.testing.assert_close(got.float().cpu(), expected, rtol=0, atol=2 * OFF[dtype])


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("page", [16, PAGE])
def test_others_attention_is_right_in_captured_steps_of_any_mix(page: int, window: int | None) -> None:
    """One graph for each library serves steps of one chunk, of several beside decodes, and with padding."""
    working, why_not = working_libraries(GPU, torch.bfloat16, page)
    if not working:
        pytest.skip(f"none is here: {'; '.join(why_not)}")
    size, most = StepSize(160, 9, 9, long=LongChunks(LONG_CHUNK, -(-2600 // page))), -(-2600 // page)
    mixes = (
        ((160, 1160),),
        ((1, 300), (1, 2000), (100, 1200), (58, 58)),
        ((1, 4), (1, 77), (90, 2500), (20, 20), (30, 700), (2, 1100), (15, 15), (1, 1)),
        *((((1, 40),) * 8 + ((151, 1024), (1, 1))), ((1, 500), (80, 1030), (79, 2400))),
    )
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(size.rows, 8, 64, generator=generator).to(GPU, torch.bfloat16)
    cache = torch.randn(2 * 4 * most, page, 2 * 64, generator=generator).to(GPU, torch.bfloat16)
    scoring = Scoring(0.125, window)
    steps = [
        [
            QuerySpan(n, tokens, tuple(random.Random(tokens).sample(range(4 * most), -(-tokens // page))))
            for n, tokens in mix
        ]
        for mix in mixes
    ]
    for library in working:
        kernels = PagedKernels([library])
        spans = StaticSpans(size, steps[0], page, StepMemory(20 * most, size.rows, GPU, size.chunks * most))
        replay = CudaCapture(GPU)(partial(kernels.attend, query, cache, spans, scoring))
        for lies in (*steps, *reversed(steps)):
            spans.place(lies)
            expected = REFERENCE.attend(query.float().cpu(), cache.float().cpu(), Spans(lies, page), scoring)
            torch.testing.assert_close(replay().float().cpu(), expected, rtol=0, atol=2 * OFF[torch.bfloat16])


class _Always(Fastest):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def find(self, key: Hashable, ways: Mapping[str, Callable[[], object]]) -> str:
        return self._name if self._name in ways else super().find(key, ways)
