"""Measure attention: decode against read bandwidth, KV in int8 against bf16, prompts against torch's SDPA, Python's
share of a call, and what a few long prefixes cost a batch of short ones.

    python -m lab.benchmarks.attention                   # two minutes
    python -m lab.benchmarks.attention --only lengths    # one part

`lengths`: decodes of 32 requests read the same number of tokens in each case: all requests have equal lengths, or two
are longer than the others by some ratio. gamma2 is the cost model's, in seconds per token: the least squares over the
ratios of T = T(all equal) + gamma2 * B * (max C - mean C). It may be noise and negative: it has no goal.

All variants of a figure run in turns, and the least time of each counts: it has the smallest error on a machine that
also does other work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

import torch
import torch.nn.functional as F

from alignedserve.kernels.common.int8_kv import quantise_vectors
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Lie, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.library import Library, usable_sets
from alignedserve.kernels.native.kernels import Native
from alignedserve.lab.benchmarks.common.report import command, report, several
from alignedserve.lab.benchmarks.common.timing import in_turns

BLOCK_SIZE = 16
CALL_US = 10.0  # goals
SPANS_US = 100.0
CALLS_AT_ONCE = 200
PARTS = ("calls", "decode", "int8", "prompts", "lengths")
REQUESTS, LONG = 32, 2
TOKENS = 32 * 504  # equal requests have a last block that is half full, as requests of any length have on average
RATIOS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Heads:
    kv_heads: int
    group: int
    head_dim: int = 64

    def __str__(self) -> str:
        return f"{self.kv_heads * self.group}_heads_{self.kv_heads}_kv_of_{self.head_dim}"


MHA, GQA, SEVEN, EIGHT = Heads(12, 1), Heads(4, 4), Heads(2, 7), Heads(2, 8, 128)


class Paged:
    """A layer's attention in a step, in bf16, ready to run: `spans` are (queries, tokens), blocks in random order."""

    def __init__(self, spans: Sequence[tuple[int, int]], heads: Heads) -> None:
        lengths = [-(-tokens // BLOCK_SIZE) for _, tokens in spans]
        pairs = random.Random(1).sample(range(sum(lengths)), sum(lengths))
        self.cache = torch.randn(2 * sum(lengths), BLOCK_SIZE, heads.kv_heads * heads.head_dim).bfloat16()
        own = [tuple(pairs.pop() for _ in range(length)) for length in lengths]
        lies = (Lie(queries, tokens, pairs) for (queries, tokens), pairs in zip(spans, own, strict=True))
        self.spans = Spans(lies, BLOCK_SIZE)
        self.query = torch.randn(self.spans.num_rows, heads.kv_heads * heads.group, heads.head_dim).bfloat16()
        self.scoring, self._heads = Scoring(heads.head_dim**-0.5), heads

    def attend(self, kernels: Kernels) -> torch.Tensor:
        return kernels.attend(self.query, self.cache, self.spans, self.scoring)

    def keep_in_int8(self) -> None:
        self.cache = quantise_vectors(self.cache.flatten(0, 1), self._heads.kv_heads).view(*self.cache.shape[:2], -1)


def decode_bandwidth(kernels: Mapping[str, Native], heads: Heads, threads: int, seconds: float) -> None:
    """Measure decodes of 32 requests of 512 tokens in three layers: more than a core's own cache holds."""
    layers = [Paged([(1, 512)] * 32, heads) for _ in range(3)]
    read_all = next(iter(kernels.values())).library.kernel("read_all", c_void_p, c_int64, returns=c_int64)

    def attend(by: Kernels) -> None:
        for layer in layers:
            layer.attend(by)

    variants: dict[str, Callable[[], object]] = {isa: partial(attend, by) for isa, by in kernels.items()}
    variants["read"] = lambda: [read_all(layer.cache.data_ptr(), layer.cache.nbytes) for layer in layers]
    took = {name: min(times) for name, times in in_turns(variants, seconds).items()}
    gigabytes = sum(layer.cache.nbytes for layer in layers) / 1e9
    for name, layers_s in took.items():
        title = f"decode_{heads}_threads_{threads}_{name}"
        report(title, gigabytes / layers_s, "GB/s", baseline=gigabytes / took["read"])


def decode_in_int8(kernels: Native, heads: Heads, threads: int, seconds: float) -> None:
    """Measure decodes of 32 requests of 512 tokens whose KV lies in int8 against the same in bf16."""
    in_bf16, in_int8 = ([Paged([(1, 512)] * 32, heads) for _ in range(3)] for _ in range(2))
    for layer in in_int8:
        layer.keep_in_int8()

    def attend(layers: Sequence[Paged]) -> None:
        for layer in layers:
            layer.attend(kernels)

    variants: dict[str, Callable[[], object]] = {"bf16": partial(attend, in_bf16), "int8": partial(attend, in_int8)}
    took = {name: median(times) / len(in_int8) * 1e6 for name, times in in_turns(variants, seconds).items()}
    title = f"decode_in_int8_{heads}_threads_{threads}"
    report(title, took["int8"], "us", baseline=took["bf16"], goal=took["bf16"])


def prompts(kernels: Mapping[str, Native], tokens: int, threads: int, seconds: float) -> None:
    paged = Paged([(tokens, tokens)], MHA)
    q, k, v = (torch.randn(1, MHA.kv_heads, tokens, MHA.head_dim).bfloat16() for _ in range(3))
    variants: dict[str, Callable[[], object]] = {isa: partial(paged.attend, by) for isa, by in kernels.items()}
    variants["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    took = {name: min(times) * 1e3 for name, times in in_turns(variants, seconds).items()}
    best = list(kernels)[-1]
    for name in kernels:
        goal = took["sdpa"] if name == best else None
        report(f"prompt_{tokens}_threads_{threads}_{name}", took[name], "ms", baseline=took["sdpa"], goal=goal)


def calls(kernels: Kernels) -> None:
    """Time the calls of a decode in a step, `write` and `attend`, without the kernels' work: their spans are empty."""
    none, heads = Spans([], BLOCK_SIZE), MHA
    cache = torch.zeros(2, BLOCK_SIZE, heads.kv_heads * heads.head_dim, dtype=torch.bfloat16)
    query, k, v = torch.zeros(1, 3 * cache.shape[-1], dtype=torch.bfloat16).chunk(3, dim=1)
    query = query.unflatten(1, (heads.kv_heads, heads.head_dim))
    lists = [tuple(random.sample(range(100_000), 32)) for _ in range(64)]

    def both() -> None:
        for _ in range(CALLS_AT_ONCE):
            kernels.write(cache, none, k, v)
            kernels.attend(query, cache, none, Scoring(0.125))

    def spans() -> None:
        for _ in range(CALLS_AT_ONCE // 10):
            _ = Spans([Lie(1, 512, pairs) for pairs in lists], BLOCK_SIZE).table

    took = in_turns({"both": both, "spans": spans}, 2.0)
    report("python_write_and_attend", min(took["both"]) / CALLS_AT_ONCE * 1e6, "us", goal=CALL_US)
    report("spans_of_64_requests_of_32_pairs", min(took["spans"]) / (CALLS_AT_ONCE // 10) * 1e6, "us", goal=SPANS_US)


# --- Lengths


def prefixes(ratio: int) -> list[int]:
    """Return lengths of a batch in which two requests are `ratio` times as long as each of the others."""
    short = TOKENS // (REQUESTS - LONG + LONG * ratio)
    long = (TOKENS - (REQUESTS - LONG) * short) // LONG
    return [long] * LONG + [short] * (REQUESTS - LONG)


def lengths(kernels: Mapping[str, Kernels], heads: Heads, threads: int, seconds: float) -> None:
    batches = {ratio: Paged([(1, tokens) for tokens in prefixes(ratio)], heads) for ratio in RATIOS}
    variants: dict[str, Callable[[], object]] = {
        f"{name}_ratio_{ratio}": partial(batch.attend, by)
        for ratio, batch in batches.items()
        for name, by in kernels.items()
    }
    took = {name: median(times) for name, times in in_turns(variants, seconds).items()}
    bubbles = [REQUESTS * (max(held) - mean(held)) for held in map(prefixes, RATIOS)]  # what gamma2 multiplies
    for name in kernels:
        title = f"alignment_{heads}_threads_{threads}_{name}"
        times = [took[f"{name}_ratio_{ratio}"] for ratio in RATIOS]
        for ratio, time in zip(RATIOS, times, strict=True):
            report(f"{title}_ratio_{ratio}", time * 1e3, "ms", baseline=times[0] * 1e3)
        points = [(bubble - bubbles[0], time - times[0]) for bubble, time in zip(bubbles, times, strict=True)][1:]
        squares = sum(x * x for x, _ in points)
        gamma2 = sum(x * y for x, y in points) / squares
        left = sum((y - gamma2 * x) ** 2 for x, y in points)
        report(f"{title}_gamma2", gamma2, "s/token")
        report(f"{title}_gamma2_standard_error", (left / (len(points) - 1) / squares) ** 0.5, "s/token")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--only", type=several(str, PARTS), default=[*PARTS], help="parts (default: all)")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds for all figures together")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    options = parser.parse_args()
    native = {isa: Native(Library(isa)) for isa in usable_sets()}
    kernels = {isa: by for isa, by in native.items() if isa != "generic"}
    counts = sorted(set(options.threads))
    best = list(kernels.values())[-1]
    measures: dict[str, list[Callable[[int, float], None]]] = {
        "decode": [partial(decode_bandwidth, kernels, heads) for heads in (MHA, GQA)],
        "int8": [partial(decode_in_int8, best, heads) for heads in (MHA, GQA, SEVEN, EIGHT)],
        "prompts": [partial(prompts, kernels, tokens) for tokens in (512, 2048)],
        "lengths": [partial(lengths, {"torch": Reference(), **native}, heads) for heads in (MHA, GQA)],
    }
    if "calls" in options.only:
        calls(best)
    wanted = [measure for part in options.only for measure in measures.get(part, ())]
    with torch.inference_mode():
        for threads in counts:
            torch.set_num_threads(threads)
            for measure in wanted:
                measure(threads, options.seconds / (len(wanted) * len(counts)))


if __name__ == "__main__":
    main()
