"""Measure linear layers of a 160 M Llama in bf16: their share of the memory's bandwidth, and against torch.

All variants of a figure run in turns over many weights, as in a model, and the least time of each counts: it has the
smallest error on a machine that also does other work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import c_int64, c_void_p
from functools import partial
from itertools import count

import torch

from alignedserve.kernels.common.linear import Linear, LinearPath, Way
from alignedserve.kernels.library import Library
from alignedserve.lab.benchmarks.common.report import command, report
from alignedserve.lab.benchmarks.common.timing import Work, in_turns

SHAPES = ((2304, 768), (768, 768), (6144, 768), (768, 3072), (32000, 768))
ROWS = (1, 4, 8, 16, 32, 64, 128, 512, 2048)
SHARE_OF_BANDWIDTH = 0.9  # goal at one row
READ_BYTES = 512 << 20
COLD_BYTES = 128 << 20  # most bytes of different weights of a shape
MOST_WEIGHTS = 24
LEAST_TURNS = 5


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds for all figures together")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    library = Library()
    counts = sorted(set(options.threads))
    each_s = options.seconds / (len(counts) * len(SHAPES) * len(ROWS))
    for threads in counts:
        torch.set_num_threads(threads)
        for out, inputs in SHAPES:
            _shape(library, threads, out, inputs, each_s)


def _shape(library: Library, threads: int, out: int, inputs: int, seconds: float) -> None:
    read_all = library.kernel("read_all", c_void_p, c_int64, returns=c_int64)
    memory = torch.zeros(READ_BYTES // 8, dtype=torch.int64)
    layers = _layers(library, out, inputs)
    ways = {way: [layer.by(way) for layer in layers] for way in layers[0].ways}
    copies = [Linear(layer.memory.clone(), None, library) for layer in layers]
    if all(copy.pack() for copy in copies):
        ways[Way.PACKED] = [copy.by(Way.PACKED) for copy in copies]
    nbytes = layers[0].weight.nbytes
    pieces, turns = READ_BYTES // nbytes, count()  # no variant finds the weights of another in the caches
    for rows in ROWS:
        x = torch.randn(rows, inputs).bfloat16()
        variants: dict[str, Work] = {way.value: partial(_next, paths, x, turns) for way, paths in ways.items()}
        if rows == 1:
            variants["read"] = lambda: read_all(memory.data_ptr() + next(turns) % pieces * nbytes, nbytes)
        took = {name: min(times) for name, times in in_turns(variants, seconds, LEAST_TURNS).items()}
        name = f"linear_{out}x{inputs}_rows_{rows}_threads_{threads}"
        if rows == 1:
            bandwidth = nbytes / took["read"]
            report(f"{name}_read", bandwidth / 1e9, "GB/s")
            share = nbytes / took[Way.NATIVE.value] / bandwidth
            report(f"{name}_share_of_read", share, "", goal=SHARE_OF_BANDWIDTH, at_least=True)
        for way in ways:
            report(f"{name}_{way.value}", took[way.value] * 1e6, "us", baseline=took[Way.TORCH.value] * 1e6)


def _next(paths: Sequence[LinearPath], x: torch.Tensor, turns: Iterator[int]) -> object:
    return paths[next(turns) % len(paths)](x)


def _layers(library: Library, out: int, inputs: int) -> list[Linear]:
    num = max(2, min(MOST_WEIGHTS, COLD_BYTES // (out * inputs * 2)))
    weights = torch.empty(num, out, inputs, dtype=torch.bfloat16)
    weights.view(torch.int16).random_(15_000, 16_500)  # fast to make: the bits of numbers between about 0.01 and 3
    return [Linear(weight, None, library) for weight in weights]


if __name__ == "__main__":
    main()
