"""Tests that tokens drawn on the GPU are those that torch draws on the CPU from the same logits, without waiting for
the GPU."""

from __future__ import annotations

import random

import pytest
import torch

from alignedserve.core import History, Sampling
from alignedserve.engine.sampling.sampling import NextToken, Sampler
from alignedserve.kernels.common import drawing
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.text.token_sets import pack_tokens
from tests.gpu.cases import GPU

VOCABULARY = 128_256
pytestmark = pytest.mark.usefixtures("unmeasured", "by_triton")


def random_wish(chance: random.Random) -> Sampling:
    """Draw a wish whose top_p does not end between two tokens of equal weight, where rounding alone would decide about
    the second."""
    return Sampling(
        chance.choice((0.0, 0.7, 1.0, 1.5)),
        chance.choice((0, 0, 1, 40, 2000)),
        chance.choice((1.0, 1.0, 0.1234567, 0.87654321, 0.99931)),
        min_p=chance.choice((0.0, 0.0, 0.05)),
    )


@pytest.mark.parametrize("columns", [1, 100, 32_000, VOCABULARY])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_drawn_is_what_torch_draws(seed: int, columns: int) -> None:
    """Of 64 draws, one may differ among many tokens: its number falls on the border of two tokens, but for rounding."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    wishes = [random_wish(chance) for _ in range(64)]
    numbers = [chance.random() for _ in wishes]
    steepness = torch.tensor([chance.choice((0.0, 0.5, 2.0, 8.0)) for _ in wishes])[:, None]
    logits = (torch.randn(64, columns, generator=generator) * steepness).bfloat16().float()
    got = choose(GPU, torch.bfloat16).kernels.draw(logits.to(GPU), wishes, numbers).tolist()
    expected = drawing.draw(logits.clone(), wishes, numbers).tolist()
    wrong = [both for both in zip(wishes, got, expected, strict=True) if both[1] != both[2]]
    assert len(wrong) <= (1 if columns > 100 else 0), wrong


@pytest.mark.parametrize("columns", [100, VOCABULARY])
def test_log_probabilities_are_those_of_torch(columns: int) -> None:
    logits = torch.randn(8, columns).bfloat16().float()
    tokens, tops = torch.randint(0, columns, (8,)), [0, 1, 5, 20, 20, 3, 2, 20]
    got = choose(GPU, torch.bfloat16).kernels.logprobs(logits.to(GPU), tokens.to(GPU), tops)
    expected = Reference().logprobs(logits, tokens, tops)
    assert got.counts.tolist() == expected.counts.tolist() == tops
    torch.testing.assert_close(got.of_token.cpu(), expected.of_token, rtol=1e-4, atol=1e-4)
    for row, count in enumerate(tops):
        assert got.tokens[row, :count].tolist() == expected.tokens[row, :count].tolist()
        torch.testing.assert_close(got.values[row, :count].cpu(), expected.values[row, :count], rtol=1e-4, atol=1e-4)


def test_nothing_waits_for_the_gpu_before_the_tokens_are_read() -> None:
    history = History((1, 2, 3, 3, 7), [4, 5], (2, 3))
    samplings = [
        Sampling(logprobs=3),
        Sampling(0.8, top_k=12, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, logit_bias=((3, 4.0),)),
        Sampling(1.2, min_p=0.1, min_tokens=9, allowed_tokens=pack_tokens(range(2, 400))),
    ]
    wanted = [NextToken(sampling, 3, f"r{row}", history, 11) for row, sampling in enumerate(samplings)]
    logits = torch.randn(3, 32_000, generator=torch.Generator().manual_seed(0))
    kernels = choose(GPU, torch.bfloat16).kernels
    for mode in ("default", "error"):  # kernels are compiled the first time
        there, sampler = logits.to(GPU), Sampler(32_000, kernels=kernels)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            drawn = sampler.draw(there, wanted)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    expected = Sampler(32_000).sample(logits, wanted)
    assert [drawing.token for drawing in drawn.read()] == [drawing.token for drawing in expected]
