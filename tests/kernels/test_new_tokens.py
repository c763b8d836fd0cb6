"""Tests of attention that rotates and writes new tokens itself, in Triton's interpreter: bit by bit what two kernels
give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.kernels.common.decoder import Angles, Heads
from alignedserve.kernels.common.failing import guard, is_replaced
from alignedserve.kernels.common.int8_kv import quantise_vectors
from alignedserve.kernels.common.placing import StepMemory
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans, StaticSpans, StepSize
from alignedserve.kernels.dispatch.paged_attention import PagedKernels
from alignedserve.kernels.dispatch.paged_libraries import FlashAttn
from alignedserve.kernels.triton import attention
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from tests.conftest import examples
from tests.kernels.samples import DTYPES
from tests.kernels.test_attention import Case, Shape, made
from tests.kernels.test_paged_libraries import FakeFlashAttn
from tests.rare import rare

KERNELS, CPU = TritonKernels(), torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu tries these kernels on the GPU"),
]

shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 4, 8, 16]),
    head_dim=st.sampled_from([2, 14, 16, 34, 64]),
    block_size=st.sampled_from([1, 3, 8, 16, 33]),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.just(5.0),
    sinks=st.booleans(),
    stretch=st.none() | st.integers(1, 150),
)
# A request with no token before, one that a piece holds, and some that are cut; 64, 128 and so on leave one token over.
lengths = st.one_of(st.just(1), st.integers(1, 80), st.sampled_from([64, 65, 128, 129]), st.integers(100, 400))


@dataclass(frozen=True)
class New:
    """A step of decodes: the cache holds the tokens before it, and NaN elsewhere."""

    cache: torch.Tensor
    spans: Spans
    qkv: torch.Tensor
    heads: Heads
    angles: Angles | None
    scoring: Scoring

    def by_one(self, kernels: TritonKernels = KERNELS) -> tuple[torch.Tensor | None, torch.Tensor]:
        cache = self.cache.clone()
        return kernels.attend_new(cache, self.spans, self.qkv, self.heads, self.angles, self.scoring), cache

    def by_two(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.cache.clone()
        query = KERNELS.rotate_and_write(cache, self.spans, self.qkv.clone(), self.heads, self.angles)
        return KERNELS.attend(query, cache, self.spans, self.scoring), cache

    def check(self) -> None:
        (got, cache), (expected, written) = self.by_one(), self.by_two()
        assert got is not None
        assert torch.equal(got.nan_to_num(7.5), expected.nan_to_num(7.5))
        assert expected.isfinite().all()
        assert torch.equal(cache.view(torch.uint8), written.view(torch.uint8))
        assert not torch.equal(cache.view(torch.uint8), self.cache.view(torch.uint8))


def new_of(
    case: Case, dtype: torch.dtype, half: int = 0, norms: torch.dtype | None = None, in_int8: bool = False
) -> New:
    step, shape = made(case, dtype), case.shape
    generator, rows = torch.Generator().manual_seed(case.seed), step.spans.num_rows
    of_norms = [None if norms is None else torch.randn(shape.head_dim, generator=generator).to(norms) for _ in "qk"]
    heads = Heads(shape.kv_heads * shape.group, shape.kv_heads, shape.head_dim, *of_norms, eps=1e-5)
    drawn = torch.randn(rows, half, generator=generator)
    cache = step.cache
    if in_int8:
        cache = quantise_vectors(cache.flatten(0, 1), shape.kv_heads).view(*cache.shape[:2], -1)
    qkv = torch.cat((step.query.flatten(1), step.k, step.v), 1)
    return New(cache, step.spans, qkv, heads, (drawn.cos(), drawn.sin()) if half else None, shape.scoring)


@settings(deadline=None, max_examples=examples(40))
@given(
    shape=shapes,
    runs=st.lists(st.tuples(lengths, st.sampled_from([0, 0, 2, 1000])), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    dtype=DTYPES,
    turned=st.sampled_from([0.0, 0.5, 1.0]),
    norms=st.sampled_from(["none", "fp32", "same"]),
    in_int8=st.booleans(),
)
def test_one_kernel_writes_and_attends_as_two_do(
    shape: Shape,
    runs: list[tuple[int, int]],
    seed: int,
    dtype: torch.dtype,
    turned: float,
    norms: str,
    in_int8: bool,
) -> None:
    """Some requests begin with the blocks of others."""
    begins = tuple(begins for _, begins in runs)
    case = Case(shape, tuple((1, tokens) for tokens, _ in runs), seed, begins if any(begins) else ())
    of_norms = {"none": None, "fp32": torch.float32, "same": dtype}[norms]
    new_of(case, dtype, int(turned * (shape.head_dim // 2)), of_norms, in_int8).check()


SHAPE = Shape(2, 2, 16, 16, None)


def test_what_is_longest_and_widest_is_cut_and_turned_as_by_two_kernels() -> None:
    """The last piece of a request is written by the program that reads it, though others ran before."""
    new_of(
        Case(Shape(1, 16, 256, 16, None), ((1, 700), (1, 1), (1, 30)), 1), torch.bfloat16, 128, torch.bfloat16
    ).check()


@rare
@settings(deadline=None, max_examples=examples(10))
@given(steps=st.lists(st.lists(lengths, min_size=3, max_size=3), min_size=2, max_size=3), shape=shapes)
def test_a_captured_step_writes_and_attends_to_the_requests_of_each_replay(
    steps: list[list[int]], shape: Shape
) -> None:
    """Two more rows are padding, which shares a place; most pieces do nothing."""
    spans: StaticSpans | None = None
    for number, tokens in enumerate(steps):
        new = new_of(Case(shape, tuple((1, count) for count in (*tokens, 1, 1)), number), torch.float32, 1)
        starts, blocks = new.spans.starts.tolist(), new.spans.blocks.tolist()
        lies = [QuerySpan(1, count, blocks[start:]) for count, start in zip(tokens, starts, strict=False)]
        lies += [QuerySpan(1, 1, blocks[-1:])] * 2
        if spans is None:
            spans = StaticSpans(StepSize(5, 5), lies, shape.block_size, StepMemory(2000, 5, CPU))
        else:
            spans.place(lies)
        captured = replace(new, spans=spans)
        (got, cache), (expected, written) = captured.by_one(), captured.by_two()
        assert got is not None
        assert torch.equal(got[:3], expected[:3])
        assert expected[:3].isfinite().all()
        for span in range(3):
            slots = spans.slots(span)
            for each in (slots, slots + shape.block_size):
                assert torch.equal(cache.flatten(0, 1)[each], written.flatten(0, 1)[each])


def test_a_step_with_a_prompt_keeps_two_kernels() -> None:
    new = new_of(Case(SHAPE, ((1, 30), (1, 4)), 3), torch.float32, 4)
    assert new.by_one()[0] is not None
    prompt = new_of(Case(SHAPE, ((1, 30), (3, 9)), 3), torch.float32, 4)
    room_for_prompts = StaticSpans(
        StepSize(2, 2, 1), [QuerySpan(1, 30, (0, 1)), QuerySpan(1, 4, (2,))], 16, StepMemory(9, 2, CPU)
    )
    many_queries = new_of(Case(Shape(1, 64, 128, 16, None), ((1, 30), (1, 4)), 3), torch.float32, 4)
    for kept in (prompt, replace(new, spans=room_for_prompts), many_queries):
        attended, cache = kept.by_one()
        assert attended is None
        assert torch.equal(cache.view(torch.uint8), kept.cache.view(torch.uint8)), "nothing is written"


def test_what_does_not_fit_is_refused() -> None:
    new = new_of(Case(SHAPE, ((1, 30), (1, 4)), 3), torch.float32, 4)
    with pytest.raises(TypeError, match="must be the same"):
        replace(new, qkv=new.qkv.half()).by_one()
    with pytest.raises(ValueError, match="do not fit a cache"):
        replace(new, qkv=new.qkv[:, :-16].contiguous()).by_one()
    with pytest.raises(ValueError, match="are not of 4 heads"):
        replace(new, scoring=Scoring(1.0, sinks=torch.zeros(3))).by_one()


def test_where_the_kernel_fails_two_kernels_of_ours_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, new = TritonKernels(), new_of(Case(SHAPE, ((1, 30), (1, 4)), 3), torch.float32, 4)
    guard(kernels, ("attend", "attend_new"), CPU)
    run = TritonKernels._run

    def broken(*args: Any) -> None:
        if len(args) > 8:  # with what rotates
            raise RuntimeError("ptxas says no")
        run(*args)

    monkeypatch.setattr(TritonKernels, "_run", broken)
    assert new.by_one(kernels)[0] is None
    assert is_replaced(kernels, "attend_new")
    assert kernels.captures, "attention is still ours"


def test_both_ways_share_the_choice_of_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner keeps a choice for the sizes and the dtypes of the arguments: nothing is measured again."""
    told = list[tuple[object, ...]]()

    class Grid:
        def __getitem__(self, _: object) -> Callable[..., None]:
            def launch(*args: object, **named: object) -> None:
                dtypes = tuple(arg.dtype if isinstance(arg, torch.Tensor) else None for arg in args)
                told.append((*dtypes, *(named[name] for name in ("HEAD_DIM", "ROWS", "GROUP"))))

            return launch

    monkeypatch.setattr(attention, "_attend", Grid())
    for norms in (None, torch.bfloat16):
        new = new_of(Case(SHAPE, ((1, 30), (1, 4)), 3), torch.bfloat16, 4, norms)
        told.clear()
        new.by_one()
        new.by_two()
        assert told[0] == told[1]


def test_what_another_library_may_attend_to_is_written_first() -> None:
    new, flash = new_of(Case(SHAPE, ((1, 30), (1, 4)), 3), torch.bfloat16, 4), FlashAttn(FakeFlashAttn())
    assert new.by_one(PagedKernels([flash]))[0] is None
    lies = [QuerySpan(1, 30, new.spans.blocks[:2].tolist()), QuerySpan(1, 4, new.spans.blocks[2:].tolist())]
    captured = replace(new, spans=StaticSpans(StepSize(2, 2), lies, 16, StepMemory(9, 2, CPU)))
    assert captured.by_one(PagedKernels([flash]))[0] is not None, "no library reads captured steps"
