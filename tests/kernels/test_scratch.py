"""Tests that a kernel that finds no scratch memory reports it, and works again once there is some."""

from __future__ import annotations

import pytest
import torch

from alignedserve.kernels.common.linear import BUCKETS, LayerShape, Tuning, Way
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.native.kernels import Native
from tests.kernels.every import on_native_kernels
from tests.kernels.samples import scratch_of, threads


@on_native_kernels
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("queries", [1, 40])
def test_attention(kernels: Native, queries: int, count: int) -> None:
    """Few rows and many, in this thread and in several: a lack of scratch memory never ends the process."""
    cache, query = torch.randn(2 * 126, 16, 64), torch.randn(queries + 1, 4, 32)
    spans = Spans([QuerySpan(queries, 2000, range(125)), QuerySpan(1, 9, (125,))], 16)
    with threads(count):
        expected = kernels.attend(query, cache, spans, Scoring(0.2))
        with scratch_of(kernels, 100), pytest.raises(MemoryError, match="no memory for what the kernel attend"):
            kernels.attend(query, cache, spans, Scoring(0.2))
        assert torch.equal(kernels.attend(query, cache, spans, Scoring(0.2)), expected)


@on_native_kernels
def test_linear_layers(kernels: Native) -> None:
    linear, x = kernels.linear(torch.randn(64, 33).bfloat16()), torch.randn(5, 33).bfloat16()
    linear.use(Tuning({LayerShape.from_weight(linear.weight): (Way.NATIVE,) * len(BUCKETS)}))
    expected = linear(x)
    with scratch_of(kernels, 100), pytest.raises(MemoryError, match="no memory for what the kernel linear"):
        linear(x)
    assert torch.equal(linear(x), expected)
