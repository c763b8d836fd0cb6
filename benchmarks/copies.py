"""How fast pages are copied, compressed and brought back, held against memcpy of as many bytes.

    python -m benchmarks.copies                      # half a minute on one core
    python -m benchmarks.copies --isa avx2           # another instruction set of the C++ kernels, or `reference`

One thread, pages of 64 tokens of a model with 12 layers and 768-wide K and V in bf16, 2.4 MB each, in blocks of 16 that
lie anywhere in a cache much larger than what a core has to itself. All of them are timed in turn, page by page, through
the interface that the engine uses; a figure is the median. Bytes are those of the page in bf16, whatever is made of it.
Ends with 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.spans import slots_of
from alignedserve.kernels.dispatch.dispatcher import Kernels, choose
from benchmarks.report import report

LAYERS, KV_DIM, TOKENS, BLOCK = 12, 768, 64, 16
PAGES, ROUNDS, REFERENCE_PAGES = 64, 40, 6
PAGE_SHAPE = (LAYERS, 2, TOKENS, KV_DIM)
PAGE_BYTES = LAYERS * 2 * TOKENS * KV_DIM * 2
GOAL = 0.8  # of memcpy, for whole pages

Piece = Callable[[int], object]


class Memory:
    """A cache and an arena, each of PAGES pages, and what a page becomes in int8."""

    def __init__(self) -> None:
        pairs = PAGES * TOKENS // BLOCK
        self.cache = _shared(LAYERS * 2 * pairs * BLOCK * KV_DIM).view(LAYERS, 2 * pairs, BLOCK, KV_DIM)
        self.arena = _shared(PAGES * PAGE_BYTES // 2).view(PAGES, *PAGE_SHAPE)
        self.cache.normal_()
        self.arena.normal_()
        anywhere = torch.tensor(random.Random(1).sample(range(pairs), pairs)).view(PAGES, -1)
        left = torch.zeros(TOKENS // BLOCK, dtype=torch.bool)
        self.slots = [slots_of(of, left, BLOCK) for of in anywhere]
        self.slots_from_right = [slots_of(of, ~left, BLOCK) for of in anywhere]
        self.levels = torch.zeros(PAGES, 2 * LAYERS, TOKENS, KV_DIM, dtype=torch.uint8)
        self.least, self.step = torch.zeros(2, PAGES, 2 * LAYERS, KV_DIM)

    def memcpy(self, page: int) -> None:
        """From one place in the cache to another in the arena, both whole."""
        start = self.cache.data_ptr() + (7 * page) % PAGES * PAGE_BYTES
        ctypes.memmove(self.arena[page].data_ptr(), start, PAGE_BYTES)

    def pieces(self, kernels: Kernels) -> dict[str, Piece]:
        def rows(page: int) -> torch.Tensor:
            return self.arena[page].view(2 * LAYERS, TOKENS, KV_DIM)

        def int8(page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return self.levels[page], self.least[page], self.step[page]

        return {
            "page gather": lambda page: kernels.gather(self.cache, self.slots[page], self.arena[page]),
            "page gather, blocks filled from the right": lambda page: kernels.gather(
                self.cache, self.slots_from_right[page], self.arena[page]
            ),
            "page scatter": lambda page: kernels.scatter(self.cache, self.slots[page], self.arena[page]),
            "page quantise": lambda page: kernels.quantise(rows(page), *int8(page)),
            "page dequantise": lambda page: kernels.dequantise(*int8(page), rows(page)),
        }


def _shared(elements: int) -> torch.Tensor:
    """As the device cache and the arena are: shared memory that begins at a page of the machine."""
    return torch.frombuffer(mmap.mmap(-1, 2 * elements), dtype=torch.bfloat16)


def gigabytes_a_second(pieces: dict[str, Piece], pages: int, rounds: int) -> dict[str, float]:
    took: dict[str, list[float]] = {name: [] for name in pieces}
    for number in range(rounds + 1):
        for page in range(pages):
            for place, (name, piece) in enumerate(pieces.items()):
                other = (page + 11 * place) % pages  # so that nothing finds what the one before it has touched
                began = perf_counter()
                piece(other)
                if number:  # the first round warms up
                    took[name].append(perf_counter() - began)
    return {name: PAGE_BYTES / median(times) / 1e9 for name, times in took.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", help="instruction set of the C++ kernels, or `reference`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    memory, kernels = Memory(), choose(torch.device("cpu"), torch.bfloat16, args.isa).kernels
    speeds = gigabytes_a_second({"memcpy": memory.memcpy, **memory.pieces(kernels)}, PAGES, ROUNDS)
    memcpy = speeds.pop("memcpy")
    met = report("memcpy of a page", memcpy, "GB/s")
    for name, speed in speeds.items():
        goal = None if "quantise" in name else GOAL * memcpy
        met &= report(f"{name}, {kernels.name}", speed, "GB/s", baseline=memcpy, goal=goal, at_least=True)
    for name, speed in gigabytes_a_second(memory.pieces(Reference()), REFERENCE_PAGES, 4).items():
        report(f"{name}, {Reference.name}", speed, "GB/s", baseline=memcpy)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
