"""Tests of K and V in int8: every instruction set of this CPU, and Triton's interpreter, against the torch reference.

What is written is equal byte by byte. Attention is held to the reference in fp32 on the numbers that the bytes stand
for. Every slot without a token is NaN: a kernel that reads one shows it.
"""

from __future__ import annotations

import os
from functools import lru_cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings

from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.kernels.common.int8_kv import dequantise_vectors, quantise_vectors
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.library import Library
from alignedserve.kernels.native.kernels import Native
from tests.kernels.every import native_sets
from tests.kernels.samples import threads
from tests.kernels.test_attention import BOUNDS as OF_WHOLE
from tests.kernels.test_attention import DTYPES, LEAST, LONG, Case, Shape, cases, made
from tests.rare import thinned

# Queries are rounded to 16 bits. In bf16, tiles of many queries round the numbers of K and V to bf16 first.
BOUNDS = {torch.float32: 5e-4, torch.bfloat16: 2 * OF_WHOLE[torch.bfloat16], torch.float16: 2**-11 + 5e-4}
OF_WEIGHTS = 2.0**-14  # rounded to 16 bits too, in steps of the largest: an error of the head, whatever the channel
SETS = native_sets()


@pytest.fixture(params=SETS or ["absent"])
def kernels(request: pytest.FixtureRequest) -> Native:
    """Yield the kernels of each instruction set that this CPU runs."""
    if not SETS:
        absent = pytest.fail if os.environ.get("CI") else pytest.skip
        absent("the C++ library was not built")
    return Native(Library(request.param))


def in_int8(cache: torch.Tensor, heads: int) -> torch.Tensor:
    return quantise_vectors(cache.flatten(0, 1), heads).view(*cache.shape[:2], -1)


def in_fp32(cache: torch.Tensor, head_dim: int) -> torch.Tensor:
    return dequantise_vectors(cache.flatten(0, 1), head_dim).view(*cache.shape[:2], -1)


@lru_cache(maxsize=400)  # a case is the same for every instruction set
def attended(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the cache that the reference writes, its attention in fp32, and the same attention over the sizes of V."""
    step, shape = made(case, dtype), case.shape
    cache = in_int8(step.cache, shape.kv_heads)
    Reference().write(cache, step.spans, step.k, step.v)
    wide = in_fp32(cache, shape.head_dim)
    expected = Reference().attend(step.query.float(), wide, step.spans, shape.scoring)
    wide[1::2] = wide[1::2].abs()
    return cache, expected, Reference().attend(step.query.float(), wide, step.spans, shape.scoring)


def check(kernels: Kernels, case: Case, dtype: torch.dtype) -> None:
    step, shape = made(case, dtype), case.shape
    cache = in_int8(step.cache, shape.kv_heads)
    expected_cache, expected, sizes = attended(case, dtype)
    kernels.write(cache, step.spans, step.k, step.v)
    assert torch.equal(cache, expected_cache), "K and V lie where the reference puts them, and nothing else was written"

    got = kernels.attend(step.query, cache, step.spans, shape.scoring)
    assert got.dtype == dtype
    error = (got.float() - expected).abs()
    of_weights = OF_WEIGHTS * sizes.amax(-1, keepdim=True)
    assert (error <= BOUNDS[dtype] * sizes + of_weights + LEAST[dtype]).all(), f"off by {(error / sizes).max():.2g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_step_attends_as_the_reference_does(kernels: Native, dtype: torch.dtype) -> None:
    @settings(max_examples=15, deadline=None)
    @given(cases)
    def holds(case: Case) -> None:
        check(kernels, case, dtype)

    holds()


@pytest.mark.parametrize(
    ("case", "dtype"), thinned(product([LONG[3], LONG[4], LONG[7]], DTYPES[:2]), usual=3)
)  # a chunk, a window, a beginning
def test_work_is_divided_over_threads_without_a_trace(kernels: Native, case: Case, dtype: torch.dtype) -> None:
    with threads(2):
        check(kernels, case, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_heads_of_many_sizes(kernels: Native, dtype: torch.dtype) -> None:
    """The scales of more heads than a vector has lanes, and heads that are longer than a vector."""
    for heads, head_dim in ((17, 2), (33, 6), (12, 64), (2, 256)):
        check(kernels, Case(Shape(heads, 1, head_dim, 16, None), ((1, 40), (3, 21), (30, 90)), heads), dtype)


EXTREMES = torch.tensor(
    [[0.0, 0.0, 0.0, 0.0], [1e-39, 0, 0, 0], [3e38, -3e38, 1, 0], [1e-30, 2e-30, -1e-30, 0], [127, -127, 0.5, 1.5]]
)


def test_a_number_is_off_by_half_a_scale_at_most_and_extremes_are_written_alike(kernels: Native) -> None:
    spans = Spans([QuerySpan(len(EXTREMES), len(EXTREMES), (0,))], 16)
    cache = torch.zeros(2, 16, KvDtype.INT8.vector_bytes(2, 2, 4), dtype=torch.int8)
    expected = cache.clone()
    kernels.write(cache, spans, EXTREMES, EXTREMES.flip(0))
    Reference().write(expected, spans, EXTREMES, EXTREMES.flip(0))
    assert torch.equal(cache, expected)
    back = in_fp32(cache, 2)[0, : len(EXTREMES)]
    largest = EXTREMES.unflatten(1, (2, 2)).abs().amax(-1, keepdim=True).expand(-1, -1, 2).flatten(1)
    assert ((back - EXTREMES).abs() <= largest / 127 * 0.502 + 2e-36).all()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_spoils_its_head_alone(kernels: Native, odd: float) -> None:
    spans = Spans([QuerySpan(20, 20, (0, 1))], 16)
    k = torch.randn(20, 2 * 32)
    v = k.clone()
    v[7, 40] = odd
    cache = torch.zeros(4, 16, KvDtype.INT8.vector_bytes(2, 32, 4), dtype=torch.int8)
    kernels.write(cache, spans, k, v)
    for queries in (1, 20):
        got = kernels.attend(
            torch.randn(queries, 2, 32), cache, Spans([QuerySpan(queries, 20, (0, 1))], 16), Scoring(0.2)
        )
        assert got[:, 0].isfinite().all()
        assert not got[-1, 1].isfinite().any()


def test_a_cache_of_other_heads_is_refused(kernels: Native) -> None:
    cache, spans = torch.zeros(2, 16, 66, dtype=torch.int8), Spans([QuerySpan(1, 1, (0,))], 16)
    with pytest.raises(ValueError, match="do not divide"):
        kernels.attend(torch.zeros(1, 2, 32), cache, spans, Scoring(1.0))
