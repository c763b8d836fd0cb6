"""Measure the time of the pool's index, and how tight its batches are.

    python -m lab.benchmarks.kvpool [--lengths FILE.csv] [--only index] [--only batches] ...

Lengths come from ShareGPT conversations (tests/simulator/data), at random places in their outputs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from time import perf_counter

from alignedserve.core import Entry
from alignedserve.kvpool.batching import BatchBounds, BatchWindow, find_batch
from alignedserve.kvpool.quadtree import QuadTree
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.requests import LENGTHS, lengths, request
from alignedserve.protocol.commands import Send
from alignedserve.protocol.events import Received
from alignedserve.protocol.messages import AskPages, AskPrefix, Commit, LeasePages, Prefix, Release
from alignedserve.scheduling.policy import DEFAULT_POLICY
from alignedserve.scheduling.promise import promise
from alignedserve.worker.page_writer import PageNames
from alignedserve.worker.step.request import WorkerRequest

BLOCK = 16
SMALL, LARGE, HUGE = 10_000, 100_000, 1_000_000
WANTED = BatchBounds(most_blocks=2_400, room=6_000, least=36, most=128)
BATCHES = 200
PROMPT, PAGE = 8_192, 64  # tokens
LOOKUPS = 300
CHANGES = 8_000


def drawn(path: Path, num: int, seed: int) -> list[int]:
    """Return prefixes of waiting requests: the prompt and a random part of the output."""
    draw, rows = random.Random(seed), lengths(path)
    picked = (draw.choice(rows) for _ in range(num))
    return [max(1, round(draw.uniform(0.8, 1.2) * prompt) + draw.randint(0, output)) for prompt, output in picked]


def blocks_of(length: int) -> int:
    return -(-(length + 1) // BLOCK)


def tree_of(prefixes: Sequence[int]) -> QuadTree:
    tree, draw = QuadTree(), random.Random(1)
    for number, length in enumerate(prefixes):
        tree.insert(str(number), length, blocks_of(length), draw.uniform(60.0, 80_000.0), 0.0)
    return tree


def changes(all_prefixes: Sequence[Sequence[int]], together: int) -> list[float]:
    """Return the seconds of an insert or a remove in each tree, `together` at a time.

    It is the median of single changes, otherwise the best turn. The trees take turns, so that other work on the machine
    affects all of them.
    """
    trees = [(prefixes, tree_of(prefixes), random.Random(2)) for prefixes in all_prefixes]
    took: list[list[float]] = [[] for _ in trees]
    for turn in range(CHANGES // together):
        for (prefixes, tree, draw), times in zip(trees, took, strict=True):
            batch = [(f"new{turn}.{i}", draw.choice(prefixes), draw.uniform(60.0, 80_000.0)) for i in range(together)]
            began = perf_counter()
            for name, length, due in batch:
                tree.insert(name, length, length // BLOCK + 1, due, 0.0)
            for name, _, _ in batch:
                tree.remove(name)
            times.append((perf_counter() - began) / 2 / together)
    return [min(times) if together > 1 else median(times) for times in took]


def batches(tree: QuadTree, num: int) -> tuple[float, list[BatchWindow], list[float]]:
    """Return the mean seconds to find and take out a batch, the batches, and the best spread for each batch's size."""
    took, found, best = 0.0, [], []
    for turn in range(num):
        before = sorted_lengths(tree) if turn % 20 == 0 else None
        began = perf_counter()
        window = find_batch(tree, WANTED, 0.0)
        members = window.members(tree)
        took += perf_counter() - began
        if before is not None:
            found.append(window)
            best.append(tightest(before, window))
        for member in members:
            tree.remove(member.id)
    return took / num, found, best


def sorted_lengths(tree: QuadTree) -> list[int]:
    return [leaf + 1 for leaf in tree.filled(range(1 << 16)) for _ in tree.members(leaf)]


def tightest(prefixes: Sequence[int], window: BatchWindow) -> float:
    """Return the least spread of as many requests in a row as the window has, with at most its blocks."""
    blocks, best = sum(map(blocks_of, prefixes[: window.num])), float("inf")
    for last in range(window.num - 1, len(prefixes)):
        first = last - window.num + 1
        if last >= window.num:
            blocks += blocks_of(prefixes[last]) - blocks_of(prefixes[first - 1])
        if blocks <= window.blocks:
            best = min(best, prefixes[last] - prefixes[first])
    return best


def lookup() -> float:
    """Return the least seconds in which a worker names a prompt's pages and the pool finds them all."""
    words, names = random.Random(5), PageNames(PAGE, PAGE, b"model bfloat16 64 ")
    asked = request("r", words.choices(range(50_000), k=PROMPT + 1), 1)
    pool = PoolCore(2 * PROMPT // PAGE, BLOCK)

    def named() -> tuple[int, ...]:
        return names.pages_of(WorkerRequest(asked, promise(asked, DEFAULT_POLICY), []), PROMPT)

    (leased,) = pool.handle(Received("prefill-0", AskPages(PROMPT // PAGE)), 0.0)
    assert isinstance(leased, Send)
    assert isinstance(leased.message, LeasePages)
    entry = Entry(asked, (1,), leased.message.pages, names=named())
    pool.handle(Received("prefill-0", Commit(entry)), 0.0)
    best = float("inf")
    for attempt in range(LOOKUPS):
        began = perf_counter()
        found, *_ = pool.handle(Received("prefill-0", AskPrefix("next", attempt, named())), 0.0)
        best = min(best, perf_counter() - began)
        assert isinstance(found, Send)
        assert isinstance(found.message, Prefix)
        assert len(found.message.pages) == PROMPT // PAGE
        pool.handle(Received("prefill-0", Release("next", attempt)), 0.0)
    return best


def report_changes(path: Path) -> None:
    small, huge = (drawn(path, num, seed=3) for num in (SMALL, HUGE))
    for together, goal in ((64, 3.0), (1, 10.0)):
        of_small, of_huge = changes((small, huge), together)
        for num, took in ((SMALL, of_small), (HUGE, of_huge)):
            report(f"insert or remove among {num:,}, {together} at a time", took * 1e6, "us", goal=goal)
        report(f"growth from {SMALL:,} to {HUGE:,}, {together} at a time", of_huge / of_small, "1", goal=1.5)


def report_batches(path: Path) -> None:
    huge = drawn(path, HUGE, seed=3)
    for num in (LARGE, HUGE):
        took, found, best = batches(tree_of(huge[:num]), BATCHES)
        report(f"a batch from {num:,}", took * 1e3, "ms", goal=0.5)
        spread = mean(window.spread for window in found)
        report(f"mean spread, of the tightest, {num:,}", (spread + 1) / (mean(best) + 1), "1", goal=1.3)
    for num in (100, 1_000, SMALL):
        fewer = drawn(path, num, seed=4)
        found, best = batches(tree_of(fewer), 1)[1:]
        spread = mean(window.spread for window in found)
        report(f"mean spread, of the tightest, {num:,}", (spread + 1) / (mean(best) + 1), "1", goal=1.3)
        fcfs = fewer[: found[0].num]
        report(f"mean spread, of first come first served, {num:,}", spread / (max(fcfs) - min(fcfs)), "1")


def report_lookup(_: Path) -> None:
    report(f"lookup of a prompt of {PROMPT:,} tokens", lookup() * 1e3, "ms", goal=0.3)


PARTS: Mapping[str, Callable[[Path], None]] = {
    "index": report_changes,
    "batches": report_batches,
    "lookup": report_lookup,
}


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="a CSV file with prompt_tokens and output_tokens")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may come several times (default: all)")
    args = parser.parse_args()
    for name in args.only or PARTS:
        PARTS[name](args.lengths)
    sys.exit(status())


if __name__ == "__main__":
    main()
