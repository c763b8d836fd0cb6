"""Tests of attention in both directions over whole texts: every instruction set of this CPU, and torch itself, against
plain sums in fp64.

Numbers beside those of the texts are NaN: a kernel that reads one shows it.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from alignedserve.kernels.common.spans import TextRows
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.native.kernels import Native
from tests.conftest import examples
from tests.kernels.every import on_all_kernels, on_native_kernels
from tests.kernels.samples import packed, scratch_of, threads
from tests.kernels.test_attention import BOUNDS, DTYPES, LEAST

SCALE = 0.3


def fused(lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """Return query, K and V of texts as a linear layer makes them: side by side in each row."""
    generator = torch.Generator().manual_seed(seed)
    return packed(generator, dtype, sum(lengths), 3, heads, head_dim).unbind(1)


def attended(query: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None) -> Tensor:
    parts = []
    for q_of, k_of, v_of in zip(*(x.double().split(lengths) for x in (query, k, v)), strict=True):
        places = torch.arange(len(q_of))
        apart = (places[:, None] - places).abs()
        scores = torch.einsum("qhd,khd->hqk", q_of, k_of) * SCALE
        if window is not None:
            scores = scores.masked_fill(apart >= window, -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_of))
    return torch.cat(parts)


@on_all_kernels
@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 20), st.integers(0, 300)), min_size=1, max_size=8),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 8, 33, 40, 64]),
    window=st.one_of(st.none(), st.integers(1, 150)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 30),
)
@example([129, 3, 513], 2, 64, None, torch.bfloat16, 0)
@example([129, 3, 513], 2, 64, 65, torch.float32, 0)
def test_each_text_attends_to_itself(
    kernels: Kernels, lengths: list[int], heads: int, head_dim: int, window: int | None, dtype: torch.dtype, seed: int
) -> None:
    query, k, v = fused(lengths, heads, head_dim, dtype, seed)
    with threads(1):
        got = kernels.attend_texts(query, k, v, TextRows(lengths), SCALE, window)
    assert got.dtype is dtype
    assert got.shape == query.shape
    exact, sizes = (attended(query, k, of, lengths, window) for of in (v, v.abs()))
    rounds_more = 1 if isinstance(kernels, Native) else 3  # torch rounds between its products too
    assert ((got.double() - exact).abs() <= rounds_more * BOUNDS[dtype] * sizes + LEAST[dtype]).all()


@on_native_kernels
def test_threads_share_texts_and_parts_of_texts(kernels: Native) -> None:
    lengths = [700, 5, 90]
    query, k, v = fused(lengths, 3, 64, torch.float32, 1)
    exact = attended(query, k, v, lengths, None)
    with threads(3):
        got = kernels.attend_texts(query, k, v, TextRows(lengths), SCALE)
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)


@on_native_kernels
def test_a_text_that_is_no_number_spoils_no_other(kernels: Native) -> None:
    lengths = [20, 7, 40]
    query, k, v = fused(lengths, 2, 32, torch.bfloat16, 2)
    clean = kernels.attend_texts(query, k, v, TextRows(lengths), SCALE)
    for of in (query, k, v):
        of[20:27] = torch.nan
    spoilt = kernels.attend_texts(query, k, v, TextRows(lengths), SCALE)
    assert spoilt[20:27].isnan().all()
    assert torch.equal(spoilt[:20], clean[:20])
    assert torch.equal(spoilt[27:], clean[27:])


@on_native_kernels
def test_faults_that_cpp_would_not_notice_are_errors(kernels: Native) -> None:
    query, k, v = fused([4, 4], 2, 32, torch.float32, 3)
    with pytest.raises(ValueError, match="the texts have 9 rows, the query has 8"):
        kernels.attend_texts(query, k, v, TextRows([4, 5]), SCALE)
    with pytest.raises(ValueError, match="query, K and V are"):
        kernels.attend_texts(query, k[:, :1], v, TextRows([4, 4]), SCALE)
    with scratch_of(kernels, 4), pytest.raises(MemoryError, match="no memory for what the kernel attend_texts"):
        kernels.attend_texts(query, k, v, TextRows([4, 4]), SCALE)
