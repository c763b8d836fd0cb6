"""Compile measured GPU times into the simulator's profiles: smaller grids, in lab/devices/profiles.

    python tools/compile_gpu_profiles.py --times ../shared/traces/gpu_times

Most sources are operator times under vLLM from LLMServingSim (MIT): attention by prompt chunk, its cached tokens,
decodes and their prefix; linear layers by tokens; per-sequence parts. They come as two lattices, one of powers of two
and one of powers of 1.5. The profiles keep the first; the second shows the error of interpolation.

The times of the A100 are from Vidur (MIT). It runs attention of prompts and of decodes one after the other, and has the
times of each alone: a step with both takes their sum. Its linear layers lack the output layer and all per-sequence
parts.

Grids are of one rank. Profiles of several ranks also have the time in which these sum their parts. At the end
composed steps of two A100s are compared with steps that were measured whole.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from alignedserve.cost.fit import spread
from alignedserve.lab.devices.device_file import described
from alignedserve.lab.devices.devices import Device
from alignedserve.lab.devices.gpu_truth import FOLDER, FORMAT, GpuTruth, Grid

PER_STEP = ("embedding", "final_layernorm")  # the other linear parts are in every layer
TWICE_A_LAYER = "layernorm"
SHARES = [1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8]
SKEW = "llmsim_RTXPRO6000_Llama-3.1-8B_tp1_skew.csv.gz"

Attention = dict[tuple[int, int, int, int], float]  # (chunk, cached, decodes, prefix) -> microseconds in a layer


@dataclass(frozen=True)
class Lattice:
    """The sizes that a profile keeps."""

    chunks: Sequence[int]
    cached: Sequence[int]
    prefixes: Sequence[int]
    decodes: Sequence[int]
    mixes: bool = True  # whether steps of prompts and decodes were measured


# The measured all-reduces to which lab/devices/devices.py is fitted: two ranks, a token to 2,048 tokens, least
# squares of relative errors.
ALL_REDUCES = {
    # PCIe 5, peer to peer. Off by 3 % (median), 13 % (most).
    "RTXPRO6000": "github.com/casys-kaist/LLMServingSim, profiler/perf/RTXPRO6000/hardware.yaml, commit 1b2cc02",
    # NVLink 3. Off by 14 % (median), 48 % (most: near 1 MB, where NCCL begins to send in another way).
    "A100": "github.com/microsoft/vidur, data/profiling/network/a100_pair_nvlink/all_reduce.csv, commit 0abb8ff",
}


@dataclass(frozen=True)
class Source(ABC):
    gpu: str
    folder: str  # the GPU's name in names of files
    model: str
    organization: str
    tensor_parallel: int

    @property
    def device(self) -> Device:
        return described({"gpu": self.gpu, "model": self.model, "tensor_parallel": self.tensor_parallel})

    @property
    def layers(self) -> int:
        return self.device.model.layers

    @property
    def name(self) -> str:
        return f"{self.folder}-{self.model}-tp{self.tensor_parallel}".lower()

    @property
    @abstractmethod
    def lattice(self) -> Lattice: ...

    @property
    @abstractmethod
    def origin(self) -> str:
        """Return the place where the times were published."""

    @property
    @abstractmethod
    def licence(self) -> str: ...

    @abstractmethod
    def read(self, folder: Path) -> Times: ...


class LlmServingSim(Source):
    @property
    def lattice(self) -> Lattice:
        powers = [16 << power for power in range(11)]
        return Lattice(powers[:8], [0, *powers], powers, [1 << power for power in range(8)])

    @property
    def origin(self) -> str:
        folder = f"{self.folder}/{self.organization}/{self.model}/bf16/tp{self.tensor_parallel}"
        return f"github.com/casys-kaist/LLMServingSim, profiler/perf/{folder}"

    @property
    def licence(self) -> str:
        return "MIT, Copyright (c) 2024, CASYS Lab at KAIST; see LICENSE beside this file"

    def read(self, folder: Path) -> Times:
        stem = folder / f"llmsim_{self.folder}_{self.model}_tp{self.tensor_parallel}"
        linear, sequence = defaultdict[int, float](float), defaultdict[int, float](float)
        for row in _rows(stem.with_name(f"{stem.name}_dense.csv")):
            times = 1 if row["layer"] in PER_STEP else self.layers * (1 + (row["layer"] == TWICE_A_LAYER))
            linear[int(row["tokens"])] += times * float(row["time_us"])
        for row in _rows(stem.with_name(f"{stem.name}_per_sequence.csv")):
            sequence[int(row["sequences"])] += float(row["time_us"])
        columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        attention: Attention = {}
        for row in _rows(stem.with_name(f"{stem.name}_attention.csv")):
            chunk, cached, decodes, prefix = (int(row[column]) for column in columns)
            attention[chunk, cached, decodes, prefix] = float(row["time_us"])
        return Times(_line(linear), _line(sequence), attention, self.layers)


@dataclass(frozen=True)
class Vidur(Source):
    """The times of Vidur, with attention of one shape: 64 query heads over 8 KV heads, in two ranks."""

    variant: str = ""  # of the model, as Vidur names it

    @property
    def lattice(self) -> Lattice:
        powers = [32 << power for power in range(7)]
        return Lattice(powers[1:], [0, *powers], [*powers, 4032], [1 << power for power in range(8)], mixes=False)

    @property
    def origin(self) -> str:
        folder = f"data/profiling/compute/{self.folder.lower()}/{self.organization}/{self._model_name}"
        return f"github.com/microsoft/vidur, {folder}"

    @property
    def licence(self) -> str:
        return "MIT, Copyright (c) Microsoft Corporation; see LICENSE beside this file"

    @property
    def _model_name(self) -> str:
        return f"{self.model}{self.variant}-hf"

    def read(self, folder: Path) -> Times:
        profiled = (self.folder.lower(), self._model_name, str(self.tensor_parallel))
        linear = {
            int(row["num_tokens"]): 1000 * self.layers * float(row["layer_linear_ms_sum"])
            for row in _rows(folder / "vidur_linear_per_layer.csv.gz")
            if (row["gpu"], row["model"], row["tp"]) == profiled
        }
        attention: Attention = {}
        for row in _rows(folder / f"vidur_{self.folder.lower()}_attention_median.csv"):
            chunk, cached, batch = (int(row[column]) for column in ("prefill_chunk", "kv_cache", "batch_size"))
            reshape_ms = float(row["in_reshape_ms"]) + float(row["out_reshape_ms"])
            if row["is_prefill"] == "True":
                attention[chunk, cached, 0, 0] = 1000 * (float(row["prefill_ms"]) + reshape_ms)
            elif batch in self.lattice.decodes and cached in self.lattice.prefixes:
                attention[0, 0, batch, cached] = 1000 * (float(row["decode_ms"]) + reshape_ms)
        kept = {tokens: linear[tokens] for tokens in sorted(linear) if tokens <= 256 or tokens % 128 == 0}
        return Times(_line(kept), _line({1: 0.0, 128: 0.0}), attention, self.layers)


SOURCES: Sequence[Source] = [
    *(LlmServingSim("RTX PRO 6000", "RTXPRO6000", "Llama-3.1-8B", "meta-llama", tp) for tp in (1, 2)),
    *(LlmServingSim("RTX PRO 6000", "RTXPRO6000", "Qwen3-32B", "Qwen", tp) for tp in (1, 2)),
    LlmServingSim("RTX 4090", "RTX4090", "Llama-3.1-8B", "meta-llama", 1),
    Vidur("A100 80GB", "A100", "CodeLlama-34b", "codellama", 2, "-Instruct"),
]
# Not a profile: it shows how near composed steps of two A100s are to steps that Splitwise measured whole.
CHECKED = Vidur("A100 80GB", "A100", "Llama-2-70b", "meta-llama", 2)


@dataclass(frozen=True)
class Times:
    """The measured times of a source, in microseconds."""

    linear: dict[str, Any]  # by tokens, over all layers
    per_sequence: dict[str, Any]
    attention: Attention  # of one layer
    layers: int

    def step_s(self, chunk: int, cached: int, decodes: int, prefix: int) -> float:
        """Return the time of a step whose attention was measured. Its tokens and requests may need interpolation."""
        once = Grid(self.linear).line(chunk + decodes) + Grid(self.per_sequence).line(decodes + (chunk > 0))
        return 1e-6 * (once + self.layers * self.attention[chunk, cached, decodes, prefix])


def _line(times: dict[int, float]) -> dict[str, Any]:
    return _grid([[*times]], [round(time_us, 1) for time_us in times.values()])


def _rows(path: Path) -> Iterator[dict[str, str]]:
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()
    yield from csv.DictReader(text.splitlines())


def compile_(times: Times, source: Source, skew: list[dict[str, str]]) -> dict[str, Any]:
    attention, lattice = times.attention, source.lattice
    decodes, prefixes = (sorted({key[axis] for key in attention if not key[0]}) for axis in (2, 3))

    def factor(chunk: int, cached: int, count: int, prefix: int) -> int:
        parts = attention[chunk, cached, 0, 0] + attention[0, 0, count, prefix]
        return round(1000 * attention[chunk, cached, count, prefix] / parts)

    return {
        "format": FORMAT,
        "about": _about(source),
        "linear": times.linear,
        "per_sequence": times.per_sequence,
        **({"all_reduce": source.device.all_reduce(ALL_REDUCES[source.folder])} if source.tensor_parallel > 1 else {}),
        "prefill": _grid(
            [lattice.chunks, lattice.cached],
            [[round(attention[chunk, cached, 0, 0], 2) for cached in lattice.cached] for chunk in lattice.chunks],
        ),
        "decode": _grid(
            [decodes, prefixes],
            [[round(attention[0, 0, count, prefix], 2) for prefix in prefixes] for count in decodes],
        ),
        "mixed": _mixed(lattice, factor),
        "skew_decode": _skew([row for row in skew if row["regime"] == "pure"]),
        "skew_mixed": _skew([row for row in skew if row["regime"] == "mixed"]),
    }


def _mixed(lattice: Lattice, factor: Callable[[int, int, int, int], int]) -> dict[str, Any]:
    """Return the factor, in thousandths, by which attention is slower when prompts and decodes share a step."""
    axes = [lattice.chunks, lattice.cached, lattice.decodes, lattice.prefixes]
    if not lattice.mixes:
        return _grid([[axis[0], axis[-1]] for axis in axes], [[[[1000] * 2] * 2] * 2] * 2)
    chunks, cached, decodes, prefixes = axes
    return _grid(axes, [[[[factor(a, b, c, d) for d in prefixes] for c in decodes] for b in cached] for a in chunks])


def _about(source: Source) -> dict[str, Any]:
    return {
        "gpu": source.gpu,
        "model": source.model,
        "tensor_parallel": source.tensor_parallel,
        "layers": source.layers,
        "dtype": "bfloat16",
        "units": "microseconds; linear and per_sequence of the whole step, attention of one layer, of one rank; "
        "mixed and skew in thousandths",
        "source": f"{source.origin}; skew of RTXPRO6000 Llama-3.1-8B tp1",
        "licence": source.licence,
        "compiled_by": "tools/compile_gpu_profiles.py",
    }


def _grid(axes: Sequence[Sequence[Any]], values: list[Any]) -> dict[str, Any]:
    return {"axes": axes, "values": values}


def _skew(rows: list[dict[str, str]]) -> dict[str, Any]:
    """Return the median alpha, in thousandths, by requests and share of long requests (the nearest measured share)."""
    by_case = defaultdict[tuple[int, float], list[float]](list)
    for row in rows:
        if row["alpha"]:
            by_case[int(row["n"]), float(row["ratio"])].append(float(row["alpha"]))
    counts = sorted({count for count, _ in by_case})

    def alpha(count: int, share: float) -> int:
        nearest = min((known for n, known in by_case if n == count), key=lambda known: abs(log(known / share)))
        return round(1000 * min(1.0, max(0.0, median(by_case[count, nearest]))))

    return _grid([counts, SHARES], [[alpha(count, share) for share in SHARES] for count in counts])


def of_one_rank(tree: dict[str, Any]) -> GpuTruth:
    """Return the time of a rank that sums nothing with others, as it was measured."""
    return GpuTruth({**tree, "about": {**tree["about"], "tensor_parallel": 1}})


def off_by(times: Times, tree: dict[str, Any], lattice: Lattice) -> dict[str, list[float]]:
    """Return the relative errors of whole steps that the profile does not hold, by kind."""
    truth = of_one_rank(tree)
    errors = defaultdict[str, list[float]](list)
    for chunk, cached, decodes, prefix in times.attention:
        kept = (not chunk or (chunk in lattice.chunks and cached in lattice.cached)) and (
            not decodes or prefix in lattice.prefixes
        )
        if chunk and not kept:
            kind = "mixed" if decodes else "prefill"
            measured = times.step_s(chunk, cached, decodes, prefix)
            predicted = truth.seconds_of([(chunk, cached)], [prefix] * decodes)
            errors[kind].append(abs(predicted / measured - 1))
    return errors


def whole_steps(folder: Path) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Return Splitwise's milliseconds of prompts together, and of a token, by the length and number of prompts.

    Batches of 64 prompts are left out: their prompts did not run together.
    """
    steps = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for row in _rows(folder / "splitwise_perf_model_measured.csv"):
        length, count = int(row["prompt_size"]), int(row["batch_size"])
        measured = (row["model"], row["hardware"], row["tensor_parallel"], row["token_size"])
        if measured == ("llama2-70b", "a100-80gb", "2", "128") and count < 64:
            steps[length, count].append((float(row["prompt_ms"]), float(row["token_ms"])))
    return steps


def print_whole_steps(folder: Path, skew: list[dict[str, str]]) -> None:
    tree = compile_(CHECKED.read(folder), CHECKED, skew)
    truths = {"with": GpuTruth(tree), "without": of_one_rank(tree)}
    for name, truth in truths.items():
        off: dict[str, list[float]] = {"prompts": [], "tokens": []}
        for (length, count), measured in whole_steps(folder).items():
            prompts_ms, token_ms = (median(times) for times in zip(*measured, strict=True))
            off["prompts"].append(1e3 * truth.seconds_of([(length, 0)] * count, []) / prompts_ms - 1)
            off["tokens"].append(1e3 * truth.seconds_of([], [length + 64] * count) / token_ms - 1)
        for kind, errors in off.items():
            least, most = min(errors), max(errors)
            print(f"{CHECKED.name} {name} all-reduce, {kind}: {median(errors):+.1%} ({least:+.1%} to {most:+.1%})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, required=True, metavar="FOLDER", help="the measured times")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: %(default)s")
    args = parser.parse_args()
    skew = [*_rows(args.times / SKEW)]
    for source in SOURCES:
        times = source.read(args.times)
        tree = compile_(times, source, skew)
        path = args.out / f"{source.name}.json"
        path.write_text(json.dumps(tree, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
        for kind, errors in off_by(times, tree, source.lattice).items():
            known = spread(errors)
            print(f"  {kind}: {len(errors)} other steps, off by {known.median:.1%} (median), {known.p90:.1%} (p90)")
    print_whole_steps(args.times, skew)
    return 0


if __name__ == "__main__":
    sys.exit(main())
