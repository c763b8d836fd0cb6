"""Measure how fast pages are copied, compressed and brought back, against memcpy of the same number of bytes.

    python -m lab.benchmarks.copies                      # a minute on one core
    python -m lab.benchmarks.copies --only arena         # a single part: `arena` or `int8`

It uses one thread, and pages of 64 tokens of a model with 12 layers and 768-wide K and V in bf16, 2.4 MB each, in
blocks of 16 at random places in the cache. All rates count the bytes of the page in bf16. All variants are timed in
turns, page by page. The exit status is 1 if a goal is missed.

    arena      requests of 512 tokens between a device cache and pages of a real arena, both ways, with and without
               `verify_pages`, and with zlib's CRC-32 after the copy; nothing else runs, so no load has more copies
    int8       compressing a page of KV to int8, and bringing it to the device, through the copier that workers use

Figures of int8 are the best of all runs, those of the arena the best but a tenth, since chance decides which data is in
the core's cache; in processor time of the thread: it never waits here, and other work may share the core.
"""

from __future__ import annotations

import ctypes
import random
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from time import thread_time

import torch

from alignedserve.engine.copying.copies import PageCopier
from alignedserve.forms.pool.int8_layout import Int8Layout
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.kvpool.arena.extents import Extents, PageBytes, PageKind
from alignedserve.lab.benchmarks.common.report import command, report, status

LAYERS, KV_DIM, PAGE, BLOCK = 12, 768, 64, 16
PAGE_BYTES = LAYERS * 2 * PAGE * KV_DIM * 2
SIZES = PageBytes(PAGE_BYTES, Int8Layout(2 * LAYERS * KV_DIM, PAGE).size)
COPY_GOAL = 0.8  # share of memcpy's rate, for whole pages
VERIFY_GOAL = 0.02  # longer at most, where nothing runs but copies
BYTES_GOAL = 0.54  # share of a bf16 page's bytes, for an int8 page
REQUEST_PAGES, REQUESTS, INT8_PAGES = 8, 4, 16
ARENA_ROUNDS = 40

Piece = Callable[[int], object]


def timed(pieces: Mapping[str, Piece], numbers: range, rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of each piece, in turns after a first round that warms up.

    No piece finds the data of the piece before it in the core's cache, and none gains by what always comes before it.
    """
    took: dict[str, list[float]] = {name: [] for name in pieces}
    names, draw = list(pieces), random.Random(1)
    for turn in range(rounds + 1):
        for number in numbers:
            draw.shuffle(names)
            for place, name in enumerate(names):
                other = numbers[(number - numbers.start + place) % len(numbers)]
                began = thread_time()
                pieces[name](other)
                if turn:
                    took[name].append(thread_time() - began)
    return took


@contextmanager
def arena_of(pages: int | Extents, payload: int | PageBytes) -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "arena"
        arena = Arena.create(path, pages=pages, payload_bytes=payload, page_size=PAGE, incarnation=1)
        with closing(arena):
            yield arena


def _address(arena: Arena, page: int) -> int:
    return torch.frombuffer(arena.payload(page), dtype=torch.uint8).data_ptr()


# --- An arena


class ArenaPieces:
    def __init__(self, arena: Arena, verified: Arena) -> None:
        """Pages in `verified` have checksums; those in the other arena are overwritten by memcpy."""
        tokens, each, pairs = (
            REQUEST_PAGES * PAGE,
            REQUEST_PAGES * PAGE // BLOCK,
            REQUESTS * REQUEST_PAGES * PAGE // BLOCK,
        )
        self._cache = torch.randn(LAYERS, 2 * pairs, BLOCK, KV_DIM, dtype=torch.bfloat16)
        anywhere = random.Random(1).sample(range(pairs), pairs)
        self._pairs = [tuple(anywhere[at : at + each]) for at in range(0, pairs, each)]
        self._pages = [tuple(range(at, at + REQUEST_PAGES)) for at in range(0, REQUESTS * REQUEST_PAGES, REQUEST_PAGES)]
        self._tokens = [tuple(random.Random(number).choices(range(50_000), k=tokens)) for number in range(REQUESTS)]
        self._plain = PageCopier(self._cache, arena, PAGE, verify=False)
        self._verified = PageCopier(self._cache, verified, PAGE, verify=True)
        self._arena = arena
        self._in_arena = [_address(arena, page) for page in range(REQUESTS * REQUEST_PAGES)]
        for number in range(REQUESTS):
            for copier in (self._plain, self._verified):
                self._copy_out(copier, number)

    def pieces(self) -> dict[str, Piece]:
        return {
            "memcpy out": lambda number: self._memcpy(number, out=True),
            "copy out": lambda number: self._copy_out(self._plain, number),
            "memcpy in": lambda number: self._memcpy(number, out=False),
            "copy in": lambda number: self._copy_in(self._plain, number),
            "copy out, verify_pages": lambda number: self._copy_out(self._verified, number),
            "copy in, verify_pages": lambda number: self._copy_in(self._verified, number),
            "zlib": self._sum_by_zlib,
        }

    def _copy_out(self, copier: PageCopier, number: int) -> None:
        copier.copy_out(self._pairs[number], self._pages[number], self._tokens[number])

    def _copy_in(self, copier: PageCopier, number: int) -> None:
        if not copier.copy_in(self._pages[number], self._pairs[number], self._tokens[number]):
            raise SystemExit("a page did not hold the data that was written there: the figures are not valid")

    def _sum_by_zlib(self, number: int) -> None:
        for page in self._pages[number]:
            zlib.crc32(self._arena.payload(page))

    def _memcpy(self, number: int, out: bool) -> None:
        for page in self._pages[number]:
            ends = (self._in_arena[page], self._cache.data_ptr() + page * PAGE_BYTES)
            ctypes.memmove(*(ends if out else ends[::-1]), PAGE_BYTES)


def report_arena() -> None:
    torch.set_num_threads(1)
    num_pages = REQUESTS * REQUEST_PAGES
    with arena_of(num_pages, PAGE_BYTES) as arena, arena_of(num_pages, PAGE_BYTES) as verified:
        took = timed(ArenaPieces(arena, verified).pieces(), range(REQUESTS), ARENA_ROUNDS)
    best = {name: sorted(times)[len(times) // 10] for name, times in took.items()}

    def speed(seconds: float) -> float:
        return REQUEST_PAGES * PAGE_BYTES / seconds / 1e9

    for way in ("out", "in"):
        memcpy, plain = speed(best[f"memcpy {way}"]), speed(best[f"copy {way}"])
        report(f"arena memcpy {way}", memcpy, "GB/s")
        report(f"arena copy {way}", plain, "GB/s", baseline=memcpy, goal=COPY_GOAL * memcpy, at_least=True)
        report(f"arena copy {way}, verify_pages", speed(best[f"copy {way}, verify_pages"]), "GB/s", baseline=plain)
        report(f"arena copy {way}, then zlib", speed(best[f"copy {way}"] + best["zlib"]), "GB/s", baseline=plain)
    both = {kind: best[f"copy out{kind}"] + best[f"copy in{kind}"] for kind in ("", ", verify_pages")}
    longer = both[", verify_pages"] / both[""] - 1
    report("arena copies out and in with verify_pages, longer by", longer, "1", goal=VERIFY_GOAL)


# --- int8


class Int8Pieces:
    """Pieces on int8 pages. Memcpy spoils the first and the last page, so they are neither compressed nor expanded."""

    def __init__(self, arena: Arena) -> None:
        each = PAGE // BLOCK
        self._pairs = [range(page * each, (page + 1) * each) for page in range(INT8_PAGES)]
        self._tokens = [tuple(range(page, page + PAGE)) for page in range(INT8_PAGES)]
        self._cache = torch.randn(LAYERS, 2 * INT8_PAGES * each, BLOCK, KV_DIM, dtype=torch.bfloat16)
        self._copier = PageCopier(self._cache, arena, PAGE, verify=False)
        extents = range(INT8_PAGES // arena.extents.kv, arena.extents.count)
        self._into = [page for extent in extents for page in arena.extents.pages(extent, PageKind.KV_INT8)]
        self._ends = (_address(arena, 0), _address(arena, INT8_PAGES - 1))
        for page in range(INT8_PAGES):
            self._copier.copy_out(self._pairs[page], (page,), self._tokens[page])

    def memcpy(self, page: int) -> None:
        ctypes.memmove(self._ends[page % 2], self._cache.data_ptr() + page * SIZES.kv, SIZES.kv)

    def compress(self, page: int) -> None:
        if not self._copier.rewrite(page, self._into[page]):
            raise SystemExit("a page could not be compressed: the figures are not valid")

    def expand(self, page: int) -> None:
        if not self._copier.copy_in((self._into[page],), self._pairs[page], self._tokens[page]):
            raise SystemExit("a page did not hold the data that was written there: the figures are not valid")


def report_int8() -> None:
    torch.set_num_threads(1)
    with arena_of(SIZES.divide(2 * INT8_PAGES), SIZES) as arena:
        own = Int8Pieces(arena)
        pieces = {"memcpy": own.memcpy, "compress": own.compress, "expand to the device": own.expand}
        took = timed(pieces, range(1, INT8_PAGES - 1), 12)
        del own, pieces
    speeds = {name: SIZES.kv / min(times) / 1e9 for name, times in took.items()}
    memcpy = speeds.pop("memcpy")
    report("memcpy of a page", memcpy, "GB/s")
    for name, speed in speeds.items():
        report(f"int8 page, {name}", speed, "GB/s", baseline=memcpy)
    extents = SIZES.divide(INT8_PAGES)
    share = extents.kv / extents.kv_int8
    report("room of an int8 page in the arena, of one in bf16", share, "1", goal=BYTES_GOAL)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--only", choices=("arena", "int8"), help="one part (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"arena": report_arena, "int8": report_int8}
    for name, report_part in parts.items():
        if args.only in (None, name):
            report_part()
    sys.exit(status())


if __name__ == "__main__":
    main()
