"""Tests of sums of ranks through each other's memory: each rank is a process that runs the kernel in Triton's
interpreter, and their memory is in files that all map."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.engine.device import shared_sums
from alignedserve.engine.device.ranks import Team
from alignedserve.engine.device.shared_sums import meet_in_memory
from alignedserve.kernels.common.decoder import Norm
from alignedserve.kernels.common.peers import HALF, Peers, bytes_for
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from alignedserve.kernels.triton.sums import sum_over
from tests.conftest import SOAK
from tests.kernels.interpreter import patch_once, round_to_bf16
from tests.kernels.samples import packed, strided
from tests.rank_processes import FileMaps, run_ranks
from tests.rare import rare

KERNELS = TritonKernels()
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu sums on two GPUs"),
]
SIZE, CHANNELS = 70, 3


def norms_of(kind: str, dtype: torch.dtype) -> tuple[Norm | None, Norm | None]:
    """Return the norm of the residual and that of the sum."""
    generator = torch.Generator().manual_seed(3)
    centred, wide = "layer" in kind, torch.float32 if "wide" in kind else dtype
    made = [
        Norm(packed(generator, wide, SIZE), packed(generator, dtype, SIZE) if centred else None, eps, centred)
        for eps in (1e-5, 0.1)
    ]
    return None if "no norm" in kind else made[0], made[1] if "after" in kind else None


def parts_of(rank: int, number: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return strided(torch.Generator().manual_seed(100 * number + rank), dtype, rows, SIZE)


def residual_of(number: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return strided(torch.Generator().manual_seed(100 * number + 99), dtype, rows, SIZE)


def summing(
    team: Team, folder: Path, rows: Sequence[int], kind: str, dtype: torch.dtype, seed: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the residuals and norms of one sum after the other, at a pace of this rank's own."""
    settings: Any = shared_sums
    settings.MOST_CHANNELS = CHANNELS  # so that a channel has several rows
    peers = meet_in_memory(team, FileMaps(folder, team.rank), torch.device("cpu"))
    patch_once(setattr)
    hesitate(random.Random(seed + team.rank))
    round_to_bf16(setattr)
    found = []
    for number, count in enumerate(rows):
        x = residual_of(number, count, dtype)
        normed = sum_over(peers, parts_of(team.rank, number, count, dtype), x, *norms_of(kind, dtype))
        found.append((x.contiguous(), normed))
    return found


def hesitate(draws: random.Random) -> None:
    """Let this process stand still, now and then, between its wait for the others and its first reading of their rows,
    and before it says that its own are there. Nothing waits for the sleeps: they only change which rank is ahead."""
    from triton.runtime.interpreter import interpreter_builder

    atomic, load, says = interpreter_builder.create_atomic_rmw, interpreter_builder.create_masked_load, [0]

    def rmw(*arguments: Any) -> Any:
        says[0] += 1
        if draws.random() < 0.1:
            time.sleep(0.005)
        return atomic(*arguments)

    def masked_load(*arguments: Any) -> Any:
        if says[0] and draws.random() < 0.5:
            time.sleep(0.05)
        says[0] = 0
        return load(*arguments)

    interpreter_builder.create_atomic_rmw, interpreter_builder.create_masked_load = rmw, masked_load


@pytest.mark.parametrize(
    ("ranks", "kind", "dtype"),
    [
        (2, "rms", torch.bfloat16),
        (2, "rms wide after", torch.bfloat16),
        (2, "no norm", torch.float16),
        (2, "layer after", torch.float32),
        (4, "layer", torch.float16),
        pytest.param(8, "rms", torch.float32, marks=rare),
    ],
)
def test_ranks_sum_through_memory_as_torch_sums(
    ranks: int, kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, and the same on all ranks, whatever the rows and the pace: two sums may have as many rows or not."""
    round_to_bf16(monkeypatch.setattr)
    rows, (norm, after) = [1, 7, 2, 1, 1, 5, 3, 8, 1], norms_of(kind, dtype)
    found = run_ranks(ranks, summing, tmp_path, rows, kind, dtype, len(kind))
    for number, count in enumerate(rows):
        total = torch.zeros(count, SIZE)
        for rank in range(ranks):
            total += parts_of(rank, number, count, dtype).float()
        x, part = residual_of(number, count, dtype), total.to(dtype)
        normed = x
        if norm is None:
            x += part
        else:
            normed = KERNELS.add_and_norm(x, part, norm, after)
        for of_rank in found:
            assert not isinstance(of_rank, str), of_rank
            assert torch.equal(of_rank[number][0], x)
            assert torch.equal(of_rank[number][1], normed)


class Baton:
    """Lets one of several threads run at a time, and the next after some accesses to memory."""

    def __init__(self, num: int, bursts: Sequence[tuple[int, int]]) -> None:
        """In its burst a thread makes so many accesses; behind the last burst all take turns."""
        self._bursts, self._alive = chain(bursts, cycle([(at, 5) for at in range(num)])), set(range(num))
        self._changed, self._number = threading.Condition(), threading.local()
        self._whose, self._left = next(self._bursts)

    def run(self, number: int, work: Callable[[], None]) -> None:
        self._number.own = number
        try:
            self.access()
            work()
        finally:
            with self._changed:
                self._alive.discard(number)
                self._pass_on()

    def access(self) -> None:
        with self._changed:
            if self._whose == self._number.own:
                self._left -= 1
                if self._left <= 0:
                    self._pass_on()
            assert self._changed.wait_for(lambda: self._whose == self._number.own, 20)

    def _pass_on(self) -> None:
        while self._alive:
            self._whose, self._left = next(self._bursts)
            if self._whose in self._alive:
                break
        self._changed.notify_all()


@settings(deadline=None, max_examples=100 if SOAK else 12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(1, 3), min_size=3, max_size=4),
    bursts=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 60)), max_size=20),
)
def test_no_order_of_accesses_lets_a_rank_read_what_another_sum_writes(
    rows: list[int], bursts: list[tuple[int, int]]
) -> None:
    """Each access of two ranks to their memory comes when the drawn bursts say so: the kernel is the real one."""
    from triton.runtime import interpreter

    memory = [torch.zeros(bytes_for(1, 2), dtype=torch.uint8) for _ in range(2)]
    addresses = torch.tensor([of.data_ptr() for of in memory])
    found: list[list[torch.Tensor]] = [[], []]

    def work(rank: int) -> None:
        for number, num in enumerate(rows):
            x = torch.zeros(num, 8)
            sum_over(Peers(rank, 1, tuple(memory), addresses), torch.full((num, 8), 10.0**number + rank), x, None, None)
            found[rank].append(x)

    baton, builder = Baton(2, bursts), interpreter.interpreter_builder
    patch_language, scopes = interpreter._patch_lang, list[Any]()

    def patch_for_all(function: Any) -> SimpleNamespace:
        """Patch Triton's language until both threads have ended."""
        scopes.append(patch_language(function))
        return SimpleNamespace(restore=lambda: None)

    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(interpreter, "_patch_lang", patch_for_all)
            for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_load"):
                monkeypatch.setattr(builder, name, partial(_accessing, baton, getattr(builder, name)))
            with ThreadPoolExecutor(2) as pool:
                done = [pool.submit(baton.run, rank, partial(work, rank)) for rank in range(2)]
            for one in done:
                one.result()
    finally:
        for scope in reversed(scopes):
            scope.restore()
    for number, num in enumerate(rows):
        for of_rank in found:
            assert torch.equal(of_rank[number], torch.full((num, 8), 2 * 10.0**number + 1))


def _accessing(baton: Baton, original: Callable[..., Any], *arguments: Any) -> Any:
    baton.access()
    return original(*arguments)


def test_what_does_not_fit_the_memory_is_refused() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    peers = Peers(0, 2, (memory,) * 2, torch.tensor([memory.data_ptr()] * 2))
    assert peers.takes(torch.ones(2, HALF // 4))
    for rows, size in ((3, HALF // 4), (1, HALF // 4 + 1), (0, 8)):
        assert not peers.takes(torch.ones(rows, size))
        with pytest.raises(ValueError, match="other rows"):
            sum_over(peers, torch.ones(rows, size), torch.ones(rows, size), None, None)
    with pytest.raises(ValueError, match="cannot be added"):
        sum_over(peers, torch.ones(2, 8), torch.ones(2, 8).half(), None, None)
    with pytest.raises(ValueError, match="other norms"):
        sum_over(
            peers,
            torch.ones(2, 8),
            torch.ones(2, 8),
            Norm(torch.ones(8), None, 1e-5, centred=False),
            Norm(torch.ones(8), None, 1e-5, centred=True),
        )
