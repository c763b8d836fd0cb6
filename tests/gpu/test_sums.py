"""Tests of sums of ranks through each other's memory: two processes on one GPU, which take turns on it, and on two."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.engine.device.ranks import Team
from alignedserve.engine.device.shared_sums import SharedSums, meet_in_memory
from alignedserve.engine.graphs import CudaCapture
from alignedserve.kernels.common.decoder import Norm
from alignedserve.kernels.common.summing import SumThenNorm
from tests.rank_processes import Heard, run_ranks

HIDDEN, SIZES = 4096, (1, 2, 8, 64, 256)
NEEDS_TWO = "two GPUs are needed, and there is one"


def numbers(seed: int, rows: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def summing(team: Team, on_two: bool) -> list[str]:
    """Return what differs of sums by kernels of their own and of graphs, which follow each other as they come."""
    from alignedserve.kernels.triton.kernels import TritonKernels
    from alignedserve.kernels.triton.sums import sum_over
    from alignedserve.transport.mapping import CudaMaps

    device, kernels, wrong = torch.device("cuda", team.rank if on_two else 0), TritonKernels(), list[str]()
    torch.cuda.set_device(device)
    norm = Norm(torch.linspace(1, 2, HIDDEN, device=device).bfloat16(), None, 1e-5, centred=False)
    peers, capture, draws = meet_in_memory(team, CudaMaps(device), device), CudaCapture(device), random.Random(5)
    inputs = {rows: (numbers(rows, rows, device), numbers(1000 + 9 * rows + team.rank, rows, device)) for rows in SIZES}

    def run(rows: int) -> torch.Tensor:
        residual, part = inputs[rows]
        x = residual.clone()
        normed = sum_over(peers, part, x, norm, None)
        assert normed is not None
        return torch.stack([x, normed])

    replays = {rows: capture(lambda rows=rows: run(rows)) for rows in SIZES}
    for number in range(60):
        rows = draws.choice(SIZES)
        x, normed = run(rows) if draws.random() < 0.3 else replays[rows]()
        expected, total = inputs[rows][0].clone(), torch.zeros(rows, HIDDEN, device=device)
        for rank in range(team.size):
            total += numbers(1000 + 9 * rows + rank, rows, device)
        if not torch.equal(kernels.add_and_norm(expected, total.bfloat16(), norm), normed):
            wrong.append(f"norms of sum {number}, of {rows} rows")
        if not torch.equal(expected, x):
            wrong.append(f"sum {number}, of {rows} rows")
    return wrong


@pytest.mark.parametrize("gpus", [1, 2])
def test_two_processes_sum_through_memory(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(NEEDS_TWO)
    assert run_ranks(2, summing, gpus > 1) == [[], []]


def choosing(team: Team) -> list[str]:
    from alignedserve.kernels.triton.kernels import TritonKernels
    from alignedserve.transport.mapping import CudaMaps

    heard, device = Heard(), torch.device("cuda", team.rank)
    norm = Norm(torch.ones(HIDDEN, device=device, dtype=torch.bfloat16), None, 1e-5, centred=False)
    layer: Any = SimpleNamespace(attention_norm=norm, after_attention=None, mlp_norm=norm, after_mlp=None)
    sums = SharedSums(team, SumThenNorm(TritonKernels(), team.total), [layer])
    like, capture = torch.zeros(1, HIDDEN, device=device, dtype=torch.bfloat16), CudaCapture(device)
    sums.choose(CudaMaps(device), SIZES, like, capture)
    return heard.lines


def test_two_ranks_choose_between_nccl_and_memory() -> None:
    """The lines have what both ways take: `-s` shows them."""
    if torch.cuda.device_count() < 2:
        pytest.skip(NEEDS_TWO)
    first, second = run_ranks(2, choosing, device="cuda")
    assert isinstance(first, list), first
    print(*first, sep="\n")
    assert "is kept" not in first[0], "both ways give the same, but for roundings"
    assert first[0].startswith("a sum of 2 ranks by NCCL / through memory, us: 1 rows ")
    assert first[1] == second[1], "both ranks take the same way"
