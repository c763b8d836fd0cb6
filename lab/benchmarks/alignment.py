"""Measure what a few long prefixes cost a batch of short ones at equal total KV, on each attention kernel.

    python -m lab.benchmarks.alignment                   # one minute
    python -m lab.benchmarks.alignment --least           # while other work runs: least times, not medians

Decode attention of 32 requests reads the same number of tokens in each case: all requests have equal lengths, or two
are longer than the others by some ratio. All kernels and ratios run in turns. gamma2 is the cost model's, in seconds
per token: the least squares over the ratios of T = T(all equal) + gamma2 * B * (max C - mean C). No figure has a goal:
gamma2 may be noise and may be negative; its standard error says how much of it is noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import mean, median

import torch

from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.library import Library, usable_sets
from alignedserve.kernels.native.kernels import Native
from alignedserve.lab.benchmarks.attention import GQA, MHA, Heads, Paged
from alignedserve.lab.benchmarks.common.report import command, report
from alignedserve.lab.benchmarks.common.timing import in_turns

REQUESTS, LONG = 32, 2
TOKENS = 32 * 504  # equal requests have a last block that is half full, as requests of any length have on average
RATIOS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Lengths:
    """Lengths of a batch in which two requests are `ratio` times as long as each of the others."""

    ratio: int

    @cached_property
    def prefixes(self) -> list[int]:
        short = TOKENS // (REQUESTS - LONG + LONG * self.ratio)
        long = (TOKENS - (REQUESTS - LONG) * short) // LONG
        return [long] * LONG + [short] * (REQUESTS - LONG)

    @property
    def bubble(self) -> float:
        """Return the factor that gamma2 multiplies."""
        return REQUESTS * (max(self.prefixes) - mean(self.prefixes))


@dataclass(frozen=True)
class Slope:
    """The slope of a line through the origin, with its standard error."""

    value: float
    error: float

    @classmethod
    def from_points(cls, points: Sequence[tuple[float, float]]) -> Slope:
        squares = sum(x * x for x, _ in points)
        value = sum(x * y for x, y in points) / squares
        left = sum((y - value * x) ** 2 for x, y in points)
        return cls(value, math.sqrt(left / (len(points) - 1) / squares))


def measure(
    kernels: dict[str, Kernels], heads: Heads, threads: int, seconds: float, typical: Callable[[list[float]], float]
) -> None:
    batches = [Lengths(ratio) for ratio in RATIOS]
    paged = {batch: Paged([(1, tokens) for tokens in batch.prefixes], heads) for batch in batches}
    variants: dict[str, Callable[[], object]] = {
        f"{name}_ratio_{batch.ratio}": partial(paged[batch].attend, by)
        for batch in batches
        for name, by in kernels.items()
    }
    took = {name: typical(times) for name, times in in_turns(variants, seconds).items()}
    for name in kernels:
        title = f"alignment_{heads}_threads_{threads}_{name}"
        times = [took[f"{name}_ratio_{ratio}"] for ratio in RATIOS]
        for ratio, time in zip(RATIOS, times, strict=True):
            report(f"{title}_ratio_{ratio}", time * 1e3, "ms", baseline=times[0] * 1e3)
        gamma2 = Slope.from_points(
            [
                (batch.bubble - batches[0].bubble, time - times[0])
                for batch, time in zip(batches[1:], times[1:], strict=True)
            ]
        )
        report(f"{title}_gamma2", gamma2.value, "s/token")
        report(f"{title}_gamma2_standard_error", gamma2.error, "s/token")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds for all figures together")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--least", action="store_true", help="report least times instead of medians")
    options = parser.parse_args()
    native = {isa: Native(Library(isa)) for isa in usable_sets()}
    kernels: dict[str, Kernels] = {"torch": Reference(), **native}
    counts = sorted(set(options.threads))
    with torch.inference_mode():
        for threads in counts:
            torch.set_num_threads(threads)
            for heads in (MHA, GQA):
                measure(kernels, heads, threads, options.seconds / (2 * len(counts)), min if options.least else median)


if __name__ == "__main__":
    main()
