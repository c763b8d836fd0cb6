"""Tests of attention over paged blocks: every instruction set of this CPU, against the torch reference in fp32.

Every slot without a token is NaN: a kernel that reads one shows it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.library import Library
from alignedserve.kernels.native.kernels import Native
from tests.conftest import examples
from tests.kernels.every import native_sets
from tests.kernels.samples import threads
from tests.rare import rarely

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# How far a result may be from the reference, as a share of the same attention over the sizes of V: the terms of a sum
# may cancel, its error does not. fp32 is held to 1e-5. A 16-bit result is rounded once (bf16 has 8 bits, fp16 11), and
# in bf16 the weights are rounded too, each by as much; 2e-4 is for the short exponential, 1e-5 for the arithmetic
# before.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2 * 2**-8 + 2e-4, torch.float16: 2**-11 + 1e-5}
LEAST = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 2**-24}  # sizes that a dtype cannot tell from 0


SETS = native_sets()


@pytest.fixture(params=SETS or ["absent"])
def kernels(request: pytest.FixtureRequest) -> Native:
    """Yield the kernels of each instruction set that this CPU runs."""
    if not SETS:
        absent = pytest.fail if os.environ.get("CI") else pytest.skip
        absent("the C++ library was not built")
    return Native(Library(request.param))


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int | None
    softcap: float | None = None
    sinks: bool = False
    stretch: int | None = None

    @property
    def scoring(self) -> Scoring:
        heads = self.kv_heads * self.group
        sinks = torch.linspace(-3, 4, heads) if self.sinks else None
        return Scoring(self.head_dim**-0.5, self.window, self.softcap, sinks, self.stretch)


@dataclass(frozen=True)
class Case:
    shape: Shape
    spans: tuple[tuple[int, int], ...]  # (queries, tokens)
    seed: int
    begins: tuple[int, ...] = ()  # how many blocks of an earlier span each begins with, as far as these are full


@dataclass(frozen=True)
class Step:
    """The tensors of a case: the cache holds the tokens before the step, and NaN elsewhere."""

    spans: Spans
    cache: torch.Tensor
    query: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def begins_with(earlier: QuerySpan, most: int, tokens: int, block_size: int) -> tuple[int, ...]:
    """Return the first blocks of an earlier span that are full before the step, and no longer than these tokens."""
    return tuple(earlier.blocks[: min(most, tokens // block_size, (earlier.tokens - earlier.queries) // block_size)])


def made(case: Case, dtype: torch.dtype) -> Step:
    """Make a step whose K, V and queries are views of one fused tensor, as in a model."""
    shape, chance = case.shape, random.Random(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    lengths = [-(-tokens // shape.block_size) for _, tokens in case.spans]
    blocks = list(range(sum(lengths) + 2))
    chance.shuffle(blocks)
    lies = list[QuerySpan]()
    for (queries, tokens), length, begins in zip(case.spans, lengths, case.begins or [0] * len(lengths), strict=True):
        shared = begins_with(chance.choice(lies), begins, tokens - queries, shape.block_size) if lies else ()
        own = tuple(blocks.pop() for _ in range(length - len(shared)))
        if not case.begins:
            own = tuple(~block if chance.random() < 0.4 else block for block in own)
        lies.append(QuerySpan(queries, tokens, shared + own))
    spans = Spans(lies, shape.block_size)
    kv_dim = shape.kv_heads * shape.head_dim
    cache = torch.full((2 * (sum(lengths) + 2), shape.block_size, kv_dim), torch.nan, dtype=dtype)
    vectors = cache.view(-1, kv_dim)
    for number, (queries, tokens) in enumerate(case.spans):
        slots = spans.slots(number)[: tokens - queries]
        for each in (slots, slots + shape.block_size):
            vectors[each] = torch.randn(len(slots), kv_dim, generator=generator).to(dtype)
    heads = shape.kv_heads * shape.group
    fused = torch.randn(spans.num_rows, (heads + 2 * shape.kv_heads) * shape.head_dim, generator=generator).to(dtype)
    query, k, v = fused.split((heads * shape.head_dim, kv_dim, kv_dim), dim=1)
    return Step(spans, cache, query.unflatten(1, (heads, shape.head_dim)), k, v)


@lru_cache(maxsize=400)  # a case is the same for every instruction set and every number of threads
def attended(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the case's attention by the reference in fp32, and the same attention over the sizes of V."""
    step = made(case, dtype)
    Reference().write(step.cache, step.spans, step.k, step.v)
    query, cache = step.query.float(), step.cache.float()
    expected = Reference().attend(query, cache, step.spans, case.shape.scoring)
    cache[1::2] = cache[1::2].abs()
    return expected, Reference().attend(query, cache, step.spans, case.shape.scoring)


def check(kernels: Kernels, case: Case, dtype: torch.dtype, bounds: Mapping[torch.dtype, float] = BOUNDS) -> None:
    step = made(case, dtype)
    expected_cache = step.cache.clone()
    Reference().write(expected_cache, step.spans, step.k, step.v)
    kernels.write(step.cache, step.spans, step.k, step.v)
    # Compared as bytes, since NaN equals nothing.
    assert torch.equal(step.cache.view(torch.uint8), expected_cache.view(torch.uint8)), (
        "K and V lie where the reference puts them, and nothing else was written"
    )

    got = kernels.attend(step.query, step.cache, step.spans, case.shape.scoring)
    assert got.dtype == dtype
    assert got.is_contiguous()
    expected, sizes = attended(case, dtype)
    error = (got.float() - expected).abs()
    assert (error <= bounds[dtype] * sizes + LEAST[dtype]).all(), f"off by {(error / sizes).max():.2g}"


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 4),
    group=st.sampled_from([1, 1, 2, 3, 4, 8]),
    head_dim=st.sampled_from([2, 14, 16, 34, 64, 80, 96, 128]),
    block_size=st.sampled_from([1, 3, 8, 16, 16, 33, 64]),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.sampled_from([0.3, 5.0, 50.0]),
    sinks=st.booleans(),
    stretch=st.none() | st.integers(1, 300),
)
one_span = st.tuples(st.sampled_from([1, 1, 1, 2, 5, 17, 64, 150]), st.integers(0, 200)).map(
    lambda span: (span[0], span[0] + span[1])
)
one_long_span = st.tuples(st.sampled_from([1, 1, 1, 1, 1, 3]), st.integers(200, 1000)).map(
    lambda span: (span[0], span[0] + span[1])
)
cases = st.builds(Case, shapes, st.lists(one_span, min_size=1, max_size=5).map(tuple), st.integers(0, 2**32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_step_attends_as_the_reference_does(kernels: Native, dtype: torch.dtype) -> None:
    @settings(max_examples=examples(60), deadline=None)
    @given(cases)
    def holds(case: Case) -> None:
        check(kernels, case, dtype)

    holds()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decodes_that_read_the_same_blocks_attend_as_the_reference_does(kernels: Native, dtype: torch.dtype) -> None:
    """Some begin with all that an earlier one has, so that there are several beginnings, one within another."""

    @settings(max_examples=examples(20), deadline=None)
    @given(
        shapes,
        st.lists(st.tuples(one_long_span, st.sampled_from([0, 4, 20, 60, 1000])), min_size=3, max_size=9),
        st.integers(0, 2**32),
    )
    def holds(shape: Shape, begun: list[tuple[tuple[int, int], int]], seed: int) -> None:
        spans, begins = zip(*begun, strict=True)
        check(kernels, Case(shape, spans, seed, begins), dtype)

    holds()


CHANGED = Shape(2, 1, 64, 16, None, softcap=5.0, sinks=True)
LONG = [
    Case(Shape(2, 1, 64, 16, None), ((1, 5000), (1, 30), (1, 7), (1, 400)), 1),  # one long request among short requests
    Case(Shape(2, 1, 64, 16, None), ((1, 5000),), 2),
    Case(Shape(1, 8, 64, 16, None), ((1, 5000), (1, 12)), 3),
    Case(Shape(2, 2, 80, 16, None), ((40, 3000), (1, 900), (3, 700)), 4),  # a chunk whose own unit is cut into pieces
    Case(Shape(2, 1, 64, 16, 700), ((300, 3000), (1, 5000), (1, 600)), 5),
    Case(Shape(1, 1, 14, 5, None), ((200, 2200), (1, 1), (1, 3000)), 6),
    Case(Shape(4, 1, 64, 16, None), tuple((1, 1100 + number) for number in range(40)), 7, (64,) * 40),
    Case(Shape(2, 4, 80, 16, None), ((3, 900), *((1, 2000 + number) for number in range(9))), 8, (120,) * 10),
    Case(replace(CHANGED, group=4), ((9, 700), *((1, 2000 + number) for number in range(9))), 9, (120,) * 10),
    Case(CHANGED, ((300, 3000), (1, 5000), (1, 600)), 10),
    Case(Shape(2, 2, 64, 16, None, stretch=900), ((300, 3000), (5, 1803), (1, 5000), (1, 2700), (1, 2701)), 11),
    Case(Shape(2, 2, 64, 16, None, stretch=400), tuple((1, 390 + number) for number in range(24)), 12, (24,) * 24),
]


@pytest.mark.parametrize(
    ("dtype", "own"),
    [
        (torch.float32, LONG[::2]),
        (torch.bfloat16, LONG[1::2]),
        rarely((torch.float32, LONG[1::2])),
        rarely((torch.bfloat16, LONG[::2])),
    ],
)
def test_work_is_divided_over_threads_without_a_trace(kernels: Native, dtype: torch.dtype, own: Sequence[Case]) -> None:
    with threads(3):
        for case in own:
            check(kernels, case, dtype)


def test_a_step_of_no_requests_attends_to_nothing(kernels: Native) -> None:
    spans, cache = Spans([], 16), torch.zeros(2, 16, 64)
    kernels.write(cache, spans, torch.empty(0, 64), torch.empty(0, 64))
    assert kernels.attend(torch.empty(0, 1, 64), cache, spans, Scoring(1.0)).shape == (0, 1, 64)
    assert not cache.any()


def test_queries_of_any_strides(kernels: Native) -> None:
    cache, spans = torch.randn(8, 16, 32), Spans([QuerySpan(20, 50, (3, 0, 1, 2))], 16)
    for query in (torch.randn(2, 20, 16).transpose(0, 1), torch.randn(20, 16, 2).transpose(1, 2)):
        got = kernels.attend(query, cache, spans, Scoring(0.25))
        torch.testing.assert_close(got, Reference().attend(query, cache, spans, Scoring(0.25)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 60])  # by rows, and by tiles
def test_a_broken_key_is_not_hidden(kernels: Native, queries: int) -> None:
    """What sees it is no number, so that no token is drawn of it: a weight of next to nothing would hide it."""
    generator = torch.Generator().manual_seed(1)
    cache, query = torch.randn(8, 16, 32, generator=generator), torch.randn(queries, 2, 16, generator=generator)
    cache[2 * 3] = torch.inf  # K of the first block
    assert kernels.attend(query, cache, Spans([QuerySpan(queries, 60, (3, 0, 1, 2))], 16), Scoring(0.25)).isnan().all()


def test_what_does_not_fit_is_refused(kernels: Native) -> None:
    cache, spans = torch.zeros(2, 16, 64), Spans([QuerySpan(1, 1, (0,))], 16)
    with pytest.raises(TypeError, match="must be the same"):
        kernels.attend(torch.zeros(1, 1, 64, dtype=torch.bfloat16), cache, spans, Scoring(1.0))
    with pytest.raises(TypeError, match="must be the same"):
        kernels.write(cache, spans, torch.zeros(1, 64), torch.zeros(1, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match="do not divide"):
        kernels.attend(torch.zeros(1, 3, 32), cache, spans, Scoring(1.0))
