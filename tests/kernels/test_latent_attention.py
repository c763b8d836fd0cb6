"""Tests of attention to compressed vectors: every instruction set of this CPU, and in fp32 the torch reference, against
attention to K and V that are both the whole vector.

Every slot without a token is NaN: a kernel that reads one shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels
from tests.conftest import examples
from tests.kernels.every import on_all_kernels, on_native_kernels
from tests.kernels.samples import threads
from tests.kernels.test_attention import BOUNDS, DTYPES, LEAST, Case, Shape, Step, made, one_long_span, one_span
from tests.rare import rarely


@dataclass(frozen=True)
class Latent:
    half: int  # of a compressed vector
    rank: int
    heads: int
    block_size: int

    def case(self, spans: tuple[tuple[int, int], ...], seed: int, begins: tuple[int, ...] = ()) -> Case:
        """Return a case whose K and V are the halves of compressed vectors."""
        return Case(Shape(1, 1, self.half, self.block_size, None), spans, seed, begins)

    @property
    def scale(self) -> float:
        return 1 / sqrt(2 * self.half)


@lru_cache(maxsize=400)  # a case is the same for every instruction set
def attended(latent: Latent, case: Case, dtype: torch.dtype) -> tuple[Step, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the case's step, its queries, their attention by the reference in fp32, and over the sizes of V."""
    step, written = made(case, dtype), made(case, dtype)
    generator = torch.Generator().manual_seed(case.seed)
    fused = torch.randn(step.spans.num_rows, latent.heads, 2 * latent.half + 3, generator=generator).to(dtype)
    query = fused[..., : 2 * latent.half]
    Reference().write(written.cache, written.spans, written.k, written.v)
    whole = written.cache.float().unflatten(0, (-1, 2)).transpose(1, 2).flatten(-2)  # [blocks, block_size, the vector]
    both = torch.stack((whole, whole), dim=1).flatten(0, 1)
    expected = Reference().attend(query.float(), both, step.spans, Scoring(latent.scale))[..., : latent.rank]
    both[1::2] = both[1::2].abs()
    sizes = Reference().attend(query.float(), both, step.spans, Scoring(latent.scale))[..., : latent.rank]
    return step, query, expected, sizes


def check(
    kernels: Kernels,
    latent: Latent,
    case: Case,
    dtype: torch.dtype,
    bounds: Mapping[torch.dtype, float] = BOUNDS,
) -> None:
    step, query, expected, sizes = attended(latent, case, dtype)
    cache = step.cache.clone()
    kernels.write(cache, step.spans, step.k, step.v)
    got = kernels.attend_latent(query, cache, step.spans, latent.scale, latent.rank)
    assert got.dtype == dtype
    assert got.is_contiguous()
    error = (got.float() - expected).abs()
    assert (error <= bounds[dtype] * sizes + LEAST[dtype]).all(), f"off by {(error / sizes).max():.2g}"


latents = st.builds(
    Latent,
    half=st.sampled_from([1, 10, 16, 33, 40, 96]),
    rank=st.just(0),
    heads=st.sampled_from([1, 2, 3, 8, 16, 40]),
    block_size=st.sampled_from([1, 3, 16, 33]),
).flatmap(
    lambda latent: st.integers(1, 2 * latent.half).map(
        lambda rank: Latent(latent.half, rank, latent.heads, latent.block_size)
    )
)


@on_all_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_step_attends_as_to_k_and_v(kernels: Kernels, dtype: torch.dtype) -> None:
    if dtype is not torch.float32 and type(kernels) is Reference:
        pytest.skip("torch rounds more often in 16 bits")

    @settings(max_examples=examples(40), deadline=None)
    @given(latents, st.lists(one_span, min_size=1, max_size=5).map(tuple), st.integers(0, 2**32))
    def holds(latent: Latent, spans: tuple[tuple[int, int], ...], seed: int) -> None:
        check(kernels, latent, latent.case(spans, seed), dtype)

    holds()


@on_native_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decodes_that_read_the_same_blocks_attend_as_to_k_and_v(kernels: Kernels, dtype: torch.dtype) -> None:
    @settings(max_examples=examples(20), deadline=None)
    @given(
        latents,
        st.lists(st.tuples(one_long_span, st.sampled_from([0, 4, 20, 60, 1000])), min_size=3, max_size=9),
        st.integers(0, 2**32),
    )
    def holds(latent: Latent, begun: list[tuple[tuple[int, int], int]], seed: int) -> None:
        spans, begins = zip(*begun, strict=True)
        check(kernels, latent, latent.case(spans, seed, begins), dtype)

    holds()


V3 = Latent(half=288, rank=512, heads=128, block_size=16)
LONG = [
    (V3, ((1, 700), (1, 30), (2, 90)), ()),
    (Latent(288, 512, 16, 16), ((1, 3000), (1, 12)), ()),
    (Latent(288, 512, 16, 16), tuple((1, 1100 + number) for number in range(8)), (64,) * 8),
    (Latent(40, 64, 4, 16), ((40, 3000), (1, 900), (3, 700)), ()),
]


@on_native_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, *map(rarely, (torch.float32, torch.float16))], ids=str)
def test_work_is_divided_over_threads_without_a_trace(kernels: Kernels, dtype: torch.dtype) -> None:
    with threads(3):
        for latent, spans, begins in LONG:
            check(kernels, latent, latent.case(spans, 1, begins), dtype)


@on_native_kernels
def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    cache, spans = torch.zeros(2, 16, 20), Spans([QuerySpan(1, 1, (0,))], 16)
    with pytest.raises(TypeError, match="must be the same"):
        kernels.attend_latent(torch.zeros(1, 1, 40, dtype=torch.bfloat16), cache, spans, 1.0, 32)
    for size, rank in ((20, 16), (40, 41), (40, 0)):
        with pytest.raises(ValueError, match="do not fit halves of 20"):
            kernels.attend_latent(torch.zeros(1, 1, size), cache, spans, 1.0, rank)
