"""Tests that ranks agree on which sums go through their memory. Each rank is a process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.core import Chunk, Decode, KvForm, Sampling, StepPlan
from alignedserve.engine.device import shared_sums
from alignedserve.engine.device.ranks import Team
from alignedserve.engine.device.shared_sums import Run, SharedSums, meet_in_memory
from alignedserve.engine.engine import Engine
from alignedserve.kernels.common.decoder import Norm
from alignedserve.kernels.common.peers import Peers
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.summing import SumThenNorm
from alignedserve.kernels.triton import sums
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from tests.engine.driver import PLENTY, Replays, prompt_of
from tests.kernels.interpreter import patch_once
from tests.models import llama
from tests.rank_processes import FileMaps, Heard, run_ranks

HIDDEN, SIZES = 40, (1, 2, 5)
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu sums on two GPUs"),
]


class Said(NamedTuple):
    lines: list[str]  # of the log
    rows: list[int]  # whose sums go through memory
    calls: list[int]  # whose sums went another way
    sums: list[torch.Tensor]  # of residuals of each number of rows, and their norms


class Went(NamedTuple):
    tokens: list[int]
    calls: list[int]  # rows of each sum through memory


class Noting(SumThenNorm):
    """Sums the other way, and notes of how many rows."""

    calls: list[int] | None = None

    def sum_add_norm(self, part: torch.Tensor, x: torch.Tensor, norm: Norm, after: Norm | None) -> torch.Tensor:
        if self.calls is not None:
            self.calls.append(len(part))
        return super().sum_add_norm(part, x, norm, after)


class Refusing(FileMaps):
    """Memory that cannot be mapped, or that is mapped but not shared, on one rank or on all."""

    def __init__(self, folder: Path, rank: int, fault: str, on: tuple[int, ...]) -> None:
        super().__init__(folder, rank)
        self._fault = fault if rank in on else ""

    def handle(self, memory: torch.Tensor) -> bytes:
        if self._fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().handle(memory)

    def map(self, handle: bytes) -> torch.Tensor:
        if self._fault == "peer" and handle != f"of-{self._rank}".encode():
            raise RuntimeError("peer access is not supported")
        found = super().map(handle)
        return found.clone() if self._fault == "copy" and handle != f"of-{self._rank}".encode() else found


def choosing(team: Team, folder: Path, fault: str, on: tuple[int, ...], faster: tuple[tuple[int, ...], ...]) -> Said:
    """Choose, where a rank finds memory `faster` for these numbers of rows; then sum each number of rows."""
    patch_once(setattr)
    patch_once(setattr)
    settings: Any = shared_sums
    settings._TIMES = settings._REPLAYS = 1
    kernel: Any = sums
    kernel.MOST_POLLS = 20 if fault in ("copy", "flags") else 100_000  # a busy machine keeps a rank waiting
    if fault == "no peers" and team.rank in on:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    if fault == "flags" and team.rank in on:
        settings.meet_in_memory = _meet_and_part
    heard = Heard()
    others = Noting(Reference(), team.total)
    norm = Norm(torch.linspace(1, 2, HIDDEN), None, 1e-5, centred=False)
    shared, like = SharedSums(team, others, [layer_with(norm)]), torch.zeros(1, HIDDEN)
    timed = iter([s for rows in SIZES for s in (2e-6, 1e-6 if rows in faster[team.rank] else 3e-6)])

    def seconds(run: Callable[[], object]) -> float:
        run()
        return next(timed)

    maps = Refusing(folder, team.rank, fault, on)
    shared.choose(maps, SIZES, like, _captured, seconds)
    others.calls = calls = []
    found = list[torch.Tensor]()
    for rows in (*SIZES, 3):
        x, part = torch.ones(rows, HIDDEN), torch.full((rows, HIDDEN), float(team.rank + 1))
        found += x, shared.sum_add_norm(part, x, norm, None)
    return Said(heard.lines, sorted(shared.rows), calls, found)


def layer_with(norm: Norm) -> Any:
    """Return a layer, of which nothing but its norms counts here."""
    return SimpleNamespace(attention_norm=norm, after_attention=None, mlp_norm=norm, after_mlp=None)


def _meet_and_part(team: Team, maps: Any, device: torch.device) -> Peers:
    """Meet, but in memory whose later changes no other rank sees."""
    met = meet_in_memory(team, maps, device)
    memory = tuple(of.clone() for of in met.memory)
    return replace(met, memory=memory, addresses=torch.tensor([of.data_ptr() for of in memory]))


def _captured(run: Run) -> Run:
    run()
    return run


def going_on(team: Team, folder: Path, shared: Path, prompt: Sequence[int], output: Sequence[int]) -> Went:
    """Run a prompt and its tokens, in captured steps; rank 0 says which tokens follow."""
    patch_once(setattr)
    settings: Any = shared_sums
    settings._TIMES, sum_over, calls = 1, shared_sums._sum_over, list[int]()
    durations = cycle([2.0] * 3 + [1.0] * 3)

    def noting(peers: Peers, part: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(part))
        return sum_over(peers, part, *rest)

    def seconds(run: Callable[[], object]) -> float:
        run()
        return next(durations)

    settings._sum_over = noting
    engine = Engine(
        *(folder,), num_blocks=8, block_size=8, dtype="float32", kernels=TritonKernels(), ranks=team, has_graphs=True
    )
    engine.capture(1, Replays(), lambda: PLENTY, 0, maps=FileMaps(shared, team.rank), seconds=seconds)
    calls.clear()
    results = [engine.step(StepPlan(1, (Chunk("r", tuple(prompt), 0, KvForm((2, 0)), Sampling()),)))]
    for at, token in enumerate(output[:-1]):
        decode = Decode("r", token, len(prompt) + at, KvForm((2, 0)), Sampling(), at + 1)
        results.append(engine.step(StepPlan(at + 2, decodes=(decode,))))
    return Went([token for result in results for _, token in result.tokens], calls)


@pytest.fixture
def chosen(tmp_path: Path) -> Callable[..., list[Said]]:
    def run(size: int, fault: str, on: tuple[int, ...], faster: tuple[tuple[int, ...], ...]) -> list[Said]:
        found = run_ranks(size, choosing, tmp_path, fault, on, faster)
        for rank in found:
            assert not isinstance(rank, str), rank
            for x, normed in zip(rank.sums[::2], rank.sums[1::2], strict=True):
                assert torch.equal(x, torch.full_like(x, 1 + sum(range(1, size + 1))))
                torch.testing.assert_close(normed, torch.linspace(1, 2, HIDDEN).expand_as(x), rtol=1e-5, atol=0)
        return found

    return run


def test_all_ranks_sum_through_memory_what_each_finds_faster(chosen: Callable[..., list[Said]]) -> None:
    for said, last in zip(chosen(2, "", (), ((1, 2), (2, 5))), ("3.0", "1.0"), strict=True):
        assert said.rows == [2]
        assert said.calls == [1, 5, 3]
        first = "3.0" if last == "1.0" else "1.0"
        told = f"1 rows 2.0 / {first}; 2 rows 2.0 / 1.0; 5 rows 2.0 / {last}"
        assert said.lines == [
            f"a sum of 2 ranks by NCCL / through memory, us: {told}",
            "ranks sum through memory for 2 rows",
        ]


@pytest.mark.parametrize(
    ("fault", "on", "why"),
    [
        ("memory", (1,), "rank 1: CUDA out of memory"),
        ("peer", (1,), "rank 1: RuntimeError: peer access is not supported"),
        ("peer", (0, 1), "rank 0: RuntimeError: peer access is not supported"),
        ("no peers", (1,), "rank 1: NCCL_P2P_DISABLE is 1"),
        ("copy", (1,), "rank 0: it reads [1, 0] in the memory of rank 0, not [1, 2]"),
    ],
)
def test_where_one_rank_cannot_share_memory_all_sum_otherwise(
    chosen: Callable[..., list[Said]], fault: str, on: tuple[int, ...], why: str
) -> None:
    for said in chosen(2, fault, on, (SIZES, SIZES)):
        assert said.rows == []
        assert said.calls == [1, 2, 5, 3]
        assert said.lines == [f"ranks sum by NCCL: {why}"]


def test_flags_that_never_arrive_end_in_sums_the_other_way_and_not_in_a_hang(
    chosen: Callable[..., list[Said]],
) -> None:
    for said in chosen(2, "flags", (1,), (SIZES, SIZES)):
        assert said.rows == []
        assert said.calls == [1, 2, 5, 3]
        assert re.fullmatch(
            r"ranks sum by NCCL: through memory, ranks sum 1 rows to off by [0-9.]+, off by [0-9.]+", said.lines[0]
        )


def test_captured_steps_sum_through_memory_and_say_what_one_rank_says(tmp_path: Path) -> None:
    folder, prompt = llama(tmp_path / "model", num_hidden_layers=2), prompt_of(5, 6)
    alone, output = Engine(folder, num_blocks=8, block_size=8, dtype="float32"), list[int]()
    for at in range(3):
        tokens = (*prompt, *output)
        chunk = Chunk("r", tokens, 0, KvForm((2, 0)), Sampling())
        output.append(alone.step(StepPlan(at, (chunk,))).tokens[0][1])
    (tmp_path / "shared").mkdir()
    first, second = run_ranks(2, going_on, folder, tmp_path / "shared", prompt, output)
    assert isinstance(first, Went), first
    assert first.tokens == output
    assert first.calls == second.calls == [1, 1, 1, 1] * 2, "two sums a layer, and not those of the prompt"
