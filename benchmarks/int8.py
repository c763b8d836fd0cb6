"""What it takes to make an int8 page of one of KV, and to bring it to the device, held against memcpy of as many bytes.

    python -m benchmarks.int8             # part of python -m benchmarks.kvpool

One thread, a model with 12 layers and 768-wide K and V in bf16, pages of 64 tokens (2.4 MB) of a real arena, through
the copier that workers use. All are timed in turn, page by page; a figure is the best, in time of the thread's own,
since nothing here waits and others may share the core. Bytes are those of the page in bf16, whatever is made of it.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import thread_time

import torch

from alignedserve.engine.copying.copies import PageCopier
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.kvpool.arena.extents import Kind, PageBytes
from alignedserve.kvpool.arena.int8_layout import Int8Layout
from benchmarks.report import report

LAYERS, KV_DIM, PAGE, BLOCK = 12, 768, 64, 16
PAGES, ROUNDS = 16, 12
SHM = Path("/dev/shm")
SIZES = PageBytes(LAYERS * 2 * PAGE * KV_DIM * 2, Int8Layout(2 * LAYERS * KV_DIM, PAGE).size)
BYTES_GOAL = 0.54  # of bf16

Piece = Callable[[int], object]


class _Bench:
    def __init__(self, arena: Arena) -> None:
        self.pairs_each = PAGE // BLOCK
        self.cache = torch.randn(LAYERS, 2 * PAGES * self.pairs_each, BLOCK, KV_DIM, dtype=torch.bfloat16)
        self.copier, self.arena = PageCopier(self.cache, arena, PAGE, verify=False), arena
        extents = range(PAGES // arena.extents.kv, arena.extents.count)
        self.into = [page for extent in extents for page in arena.extents.pages(extent, Kind.KV_INT8)]
        self._from, self._to = (
            torch.frombuffer(arena.payload(page), dtype=torch.uint8).data_ptr() for page in (0, PAGES - 1)
        )
        for page in range(PAGES):
            self.copier.copy_out(self._pairs(page), (page,), self._tokens(page))

    def _pairs(self, page: int) -> range:
        return range(page * self.pairs_each, (page + 1) * self.pairs_each)

    def _tokens(self, page: int) -> tuple[int, ...]:
        return tuple(range(page, page + PAGE))

    def memcpy(self, page: int) -> None:
        other = self.cache.data_ptr() + page * SIZES.kv
        ctypes.memmove(self._from if page % 2 else self._to, other, SIZES.kv)

    def compress(self, page: int) -> None:
        if not self.copier.compress(page, self.into[page]):
            raise SystemExit("a page could not be compressed: these figures mean nothing")

    def expand(self, page: int) -> None:
        if not self.copier.copy_in((self.into[page],), self._pairs(page), self._tokens(page)):
            raise SystemExit("a page did not hold what was written there: these figures mean nothing")


def run() -> bool:
    """Whether all goals are met."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        path = Path(folder) / "arena"
        arena = Arena.create(path, pages=SIZES.divide(2 * PAGES), payload_bytes=SIZES, page_size=PAGE, incarnation=1)
        with closing(arena):
            bench = _Bench(arena)
            pieces: dict[str, Piece] = {"compress": bench.compress, "expand to the device": bench.expand}
            took: dict[str, float] = {}
            for _ in range(ROUNDS):
                for page in range(1, PAGES - 1):
                    for name, piece in {"memcpy": bench.memcpy, **pieces}.items():
                        # memcpy spoils the first and the last page, which are not compressed
                        began = thread_time()
                        piece(page)
                        took[name] = min(took.get(name, 1.0), thread_time() - began)
            del bench
    speeds = {name: SIZES.kv / seconds / 1e9 for name, seconds in took.items()}
    memcpy = speeds.pop("memcpy")
    report("memcpy of a page", memcpy, "GB/s")
    for name, speed in speeds.items():
        report(f"int8 page, {name}", speed, "GB/s", baseline=memcpy)
    extents = SIZES.divide(PAGES)
    share = extents.kv / extents.kv_int8
    return report("room of an int8 page in the arena, of one in bf16", share, "1", goal=BYTES_GOAL)


if __name__ == "__main__":
    sys.exit(not run())
