"""KV between a device cache and pages of a real arena, both ways, held against memcpy of as many bytes.

    python -m benchmarks.arena            # part of python -m benchmarks.kvpool

One thread, a model with 12 layers and 768-wide K and V in bf16, pages of 64 tokens (2.4 MB), requests of 512 tokens
whose blocks of 16 lie anywhere in the cache. Each way is timed with and without `verify_pages`, in turn with memcpy,
request by request; a figure is the best of all, in time of the thread's own, since nothing here waits and others may
share the core. Ends with 1 where a goal is missed.
"""

from __future__ import annotations

import ctypes
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import thread_time

import torch

from alignedserve.engine.copying.copies import PageCopier
from alignedserve.kvpool.arena.arena import Arena
from benchmarks.report import report

LAYERS, KV_DIM, PAGE, BLOCK = 12, 768, 64, 16
PAGE_BYTES = LAYERS * 2 * PAGE * KV_DIM * 2
TOKENS, REQUESTS, ROUNDS = 512, 4, 8
PAGES_EACH, PAIRS_EACH = TOKENS // PAGE, TOKENS // BLOCK
GOAL = 0.8  # of memcpy
SHM = Path("/dev/shm")

Piece = Callable[[int], object]


class _Bench:
    def __init__(self, arena: Arena) -> None:
        pairs = REQUESTS * PAIRS_EACH
        self.cache = torch.randn(LAYERS, 2 * pairs, BLOCK, KV_DIM, dtype=torch.bfloat16)
        anywhere = random.Random(1).sample(range(pairs), pairs)
        self.pairs = [tuple(anywhere[at : at + PAIRS_EACH]) for at in range(0, pairs, PAIRS_EACH)]
        self.pages = [tuple(range(at, at + PAGES_EACH)) for at in range(0, REQUESTS * PAGES_EACH, PAGES_EACH)]
        self.tokens = [tuple(random.Random(one).choices(range(50_000), k=TOKENS)) for one in range(REQUESTS)]
        self.plain, self.verified = (PageCopier(self.cache, arena, PAGE, verify) for verify in (False, True))
        self._in_cache = self.cache.data_ptr()
        self._in_arena = [_address(arena, page) for page in range(REQUESTS * PAGES_EACH)]

    def pieces(self) -> dict[str, Piece]:
        """The checksum that is verified is the one that was written before it, so the order matters."""
        return {
            "memcpy out": lambda one: self._memcpy(one, out=True),
            "copy out": lambda one: self.plain.copy_out(self.pairs[one], self.pages[one], self.tokens[one]),
            "memcpy in": lambda one: self._memcpy(one, out=False),
            "copy in": lambda one: self._copy_in(self.plain, one),
            "copy out, verify_pages": lambda one: self.verified.copy_out(
                self.pairs[one], self.pages[one], self.tokens[one]
            ),
            "copy in, verify_pages": lambda one: self._copy_in(self.verified, one),
        }

    def _copy_in(self, copier: PageCopier, one: int) -> None:
        if not copier.copy_in(self.pages[one], self.pairs[one], self.tokens[one]):
            raise SystemExit("a page did not hold what was written there: these figures mean nothing")

    def _memcpy(self, one: int, out: bool) -> None:
        for page in self.pages[one]:
            ends = (self._in_arena[page], self._in_cache + page * PAGE_BYTES)
            ctypes.memmove(*(ends if out else ends[::-1]), PAGE_BYTES)


def _address(arena: Arena, page: int) -> int:
    return torch.frombuffer(arena.payload(page), dtype=torch.uint8).data_ptr()


def seconds(pieces: dict[str, Piece]) -> dict[str, float]:
    took: dict[str, list[float]] = {name: [] for name in pieces}
    for number in range(ROUNDS + 1):
        for one in range(REQUESTS):
            for name, piece in pieces.items():
                began = thread_time()
                piece(one)
                if number:  # the first round warms up
                    took[name].append(thread_time() - began)
    return {name: min(times) for name, times in took.items()}


def run() -> bool:
    """Whether all goals are met."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        pages = REQUESTS * PAGES_EACH
        arena = Arena.create(
            Path(folder) / "arena", pages=pages, payload_bytes=PAGE_BYTES, page_size=PAGE, incarnation=1
        )
        with closing(arena):
            took = seconds(_Bench(arena).pieces())
    speeds = {name: PAGES_EACH * PAGE_BYTES / one / 1e9 for name, one in took.items()}
    met = True
    for way in ("out", "in"):
        memcpy, plain = speeds[f"memcpy {way}"], speeds[f"copy {way}"]
        report(f"arena memcpy {way}", memcpy, "GB/s")
        met &= report(f"arena copy {way}", plain, "GB/s", baseline=memcpy, goal=GOAL * memcpy, at_least=True)
        report(f"arena copy {way}, verify_pages", speeds[f"copy {way}, verify_pages"], "GB/s", baseline=plain)
    return met


if __name__ == "__main__":
    sys.exit(not run())
