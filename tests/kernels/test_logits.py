"""Tests that the likeliest token of each row is the reference's, whatever the row holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import Sampling
from alignedserve.kernels.common.drawing import NONE, greedy
from alignedserve.kernels.dispatch.dispatcher import Kernels
from tests.kernels.every import on_all_kernels

SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, -3e38)


def likeliest(kernels: Kernels, logits: torch.Tensor) -> list[int]:
    tokens: list[int] = kernels.draw(logits, [Sampling()] * len(logits), [0.0] * len(logits)).tolist()
    return tokens


@dataclass(frozen=True)
class Rows:
    logits: torch.Tensor


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """Draw rows with few different numbers, so that many are equal, and some are NaN or infinite. They are part of
    wider rows."""
    count, width, beyond = draw(st.integers(1, 5)), draw(st.integers(1, 300)), draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randint(-4, draw(st.sampled_from((-3, 0, 90))), (count, width + beyond), generator=generator) / 2
    for _ in range(draw(st.integers(0, 3))):
        logits[draw(st.integers(0, count - 1)), draw(st.integers(0, width - 1))] = draw(st.sampled_from(SPECIAL))
    return Rows(logits[:, :width])


@on_all_kernels
@given(of=rows())
@settings(deadline=None, max_examples=30)
def test_it_is_the_references(kernels: Kernels, of: Rows) -> None:
    assert likeliest(kernels, of.logits) == greedy(of.logits).tolist()


@on_all_kernels
@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_rows_without_one(kernels: Kernels, width: int) -> None:
    """A row with a NaN anywhere, without a possible token, or with an infinite logit has no likeliest token; the row
    beside it has one."""
    logits = torch.zeros(4, width)
    logits[0, -1], logits[1], logits[2, width // 2], logits[3, width // 3] = math.nan, -math.inf, math.inf, 1.0
    assert likeliest(kernels, logits) == [NONE, NONE, NONE, width // 3]


@on_all_kernels
def test_many_rows_over_threads(kernels: Kernels) -> None:
    # many logits are equal
    logits = torch.randn(40, 5_000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert likeliest(kernels, logits) == greedy(logits).tolist()
