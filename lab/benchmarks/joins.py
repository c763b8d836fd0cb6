"""Measure what a join of a long request costs the requests that decode meanwhile, between two steps and beside them.

    python -m lab.benchmarks.joins               # a minute
    python -m lab.benchmarks.joins --threads 2   # steps compute in as many threads

A model with 12 layers and 768-wide K and V in bf16 (36 KB for a token) decodes 16 requests of 256 tokens, step by step,
while the KV of a request of 8,192 tokens comes from the arena: between two steps; beside them at full speed; and beside
them at the pace of all copies beside steps (pace.py). Three figures of each way, medians of the rounds, all on the
clock: the longest time between two tokens of the others, what the others lost in all until the request could join, and
the time until then.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter

import torch

from alignedserve.core import Decode, Sampling, StepPlan
from alignedserve.engine.copying.aside import AsideCopies
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device.pace import CopyPace
from alignedserve.engine.engine import Engine
from alignedserve.lab.benchmarks.common.models import MAKERS, VOCAB
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.copies import arena_of
from alignedserve.protocol.commands import CopyIn

LAYERS, KV_DIM, PAGE, BLOCK = 12, 768, 64, 16
PAGE_BYTES = PAGE * LAYERS * 2 * KV_DIM * 2
LENGTH, BATCH, PREFIX = 8192, 16, 256
EACH = PREFIX // BLOCK + 1
NUM_PAIRS = BATCH * EACH + LENGTH // BLOCK
TOKENS = tuple(random.Random(1).choices(range(VOCAB), k=LENGTH))
POOL = "pool-0.1"


class Bench:
    """An engine whose requests decode, and pages of one that is to join them."""

    def __init__(self, engine: Engine, copier: PageCopier) -> None:
        self._engine, self._copier = engine, copier
        self._pages = tuple(range(LENGTH // PAGE))
        self._pairs = tuple(random.Random(2).sample(range(BATCH * EACH, NUM_PAIRS), LENGTH // BLOCK))
        pairs = [tuple(range(at * EACH, (at + 1) * EACH)) for at in range(BATCH)]
        self._plan = StepPlan(1, (), tuple(Decode(f"{i}", 5, PREFIX, pairs[i], Sampling(), 1) for i in range(BATCH)))
        copier.copy_out(self._pairs, self._pages, TOKENS)

    def step(self, pace: CopyPace) -> float:
        """Run a step, and return when it has ended."""
        with pace.step():
            self._engine.step(self._plan)
        return perf_counter()

    def between(self) -> tuple[list[float], float]:
        """Copy the request in between two steps; return when steps ended from then on, and when it could join."""
        pace = CopyPace()
        ends = [self.step(pace)]
        assert self._copier.copy_in(self._pages, self._pairs, TOKENS)
        joined = perf_counter()
        return [*ends, self.step(pace)], joined

    def beside(self, share: float) -> tuple[list[float], float]:
        """Do the same beside the steps, at this pace."""
        pace, joined, ended = CopyPace(share, torch.get_num_threads()), list[float](), Event()

        def post(_: object) -> None:
            joined.append(perf_counter())
            ended.set()

        aside = AsideCopies(PAGE, pace)
        aside.attach(self._copier, POOL)
        ends = [self.step(pace)]
        aside.add(CopyIn(1, POOL, self._pages, self._pairs, TOKENS, aside=True), post)
        while not ended.is_set():
            ends.append(self.step(pace))
        aside.close()
        return ends, joined[0]


def measure(bench: Bench, rounds: int) -> None:
    ways: dict[str, Callable[[], tuple[list[float], float]]] = {
        "between two steps": bench.between,
        "beside them at full speed": lambda: bench.beside(1.0),
        "beside them, paced": lambda: bench.beside(0.04),
    }
    alone, gaps, lost, took = list[float](), *({way: list[float]() for way in ways} for _ in range(3))
    for _ in range(rounds):
        ends = [bench.step(CopyPace()) for _ in range(9)]
        step_s = (ends[-1] - ends[0]) / 8
        alone.append(step_s)
        for way, join in ways.items():
            ends, joined = join()
            gaps[way].append(max(after - before for before, after in pairwise(ends)))
            lost[way].append(ends[-1] - ends[0] - (len(ends) - 1) * step_s)
            took[way].append(joined - ends[0])
    report(f"a decode step of {BATCH} requests", 1e3 * median(alone), "ms")
    for way in ways:
        report(f"{way}: longest time between two tokens of the others", 1e3 * median(gaps[way]), "ms")
        report(f"{way}: lost by the others", 1e3 * median(lost[way]), "ms")
        report(f"{way}: until the request can join", 1e3 * median(took[way]), "ms")


@contextmanager
def setting() -> Iterator[Bench]:
    with TemporaryDirectory(dir="/dev/shm") as directory:
        folder = MAKERS["llama160m"](Path(directory) / "model")
        engine = Engine(folder, num_pairs=NUM_PAIRS, block_size=BLOCK, dtype="bfloat16")
        engine.cache.normal_()
        with arena_of(LENGTH // PAGE, PAGE_BYTES) as arena:
            yield Bench(engine, PageCopier(engine.cache, arena, PAGE, verify=False))


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of each figure")
    parser.add_argument("--threads", type=int, default=1, help="that a step computes in")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with setting() as bench:
        measure(bench, args.rounds)
    sys.exit(status())


if __name__ == "__main__":
    main()
