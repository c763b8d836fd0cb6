"""The Triton kernels, compiled, against the reference on the CPU in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from alignedserve.kernels.dispatch import choose
from alignedserve.kernels.reference import Reference
from tests.gpu.cases import random_step

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OFF = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.003}  # of numbers of about 1
REFERENCE = Reference()
GPU = torch.device("cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel_works_here(dtype: torch.dtype) -> None:
    chosen = choose(GPU, dtype)
    assert chosen.kernels.name.startswith("Triton")
    assert chosen.why.startswith("all work"), chosen.why


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(30))
def test_any_step_attends_as_the_reference_does(seed: int, dtype: torch.dtype) -> None:
    step, kernels = random_step(seed, dtype), choose(GPU, dtype).kernels
    scale = step.query.shape[-1] ** -0.5
    cache = step.cache.to(GPU)
    kernels.write(cache, step.spans, step.k.to(GPU), step.v.to(GPU))
    REFERENCE.write(step.cache, step.spans, step.k, step.v)
    assert torch.equal(cache.cpu().nan_to_num(), step.cache.nan_to_num())
    assert torch.equal(cache.cpu().isnan(), step.cache.isnan())
    got = kernels.attend(step.query.to(GPU), cache, step.spans, scale, step.window)
    wide = replace(step, cache=step.cache.float(), query=step.query.float())
    expected = REFERENCE.attend(wide.query, wide.cache, step.spans, scale, step.window)
    torch.testing.assert_close(got.float().cpu(), expected, rtol=0, atol=2 * OFF[dtype])


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
    on_gpu = tuple(one.to(GPU) for one in levels)
    REFERENCE.quantise(rows, *levels)
    kernels.quantise(rows.to(GPU), *on_gpu)
    assert (on_gpu[0].cpu().int() - levels[0].int()).abs().max() <= 1
    out, expected = torch.empty_like(rows, device=GPU), torch.empty_like(rows)
    q, least, step = (one.to(GPU) for one in levels)
    kernels.dequantise(q, least, step, out)
    REFERENCE.dequantise(*levels, expected)
    torch.testing.assert_close(out.cpu(), expected)
