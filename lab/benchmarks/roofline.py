"""Measure how near computed devices are to measured ones: `python -m lab.benchmarks.roofline [--times FOLDER]`.

Always against the profiles that are shipped, on random steps. With --times, the folder of measured times, also against
linear layers (Vidur), whole steps of engines of 2023 and 2024 (Splitwise, DistServe, Sarathi), whose host work the
simulator leaves out, and the room for KV that DistServe measured. Errors are computed over measured, less 1.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median

from alignedserve.core import WorkerLimits
from alignedserve.cost.trials import Bounds, Trial, random_trials
from alignedserve.errors import ProfileError
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.devices import gpu_truth, roofline
from alignedserve.lab.devices.device_file import described
from alignedserve.lab.devices.devices import GPUS, MODELS, Device, Gpu
from alignedserve.lab.devices.gpu_truth import GpuTruth
from alignedserve.lab.devices.roofline import Roofline

MEDIAN, P90 = 10.0, 25.0  # goals in %, those of the cost model
STEPS = 150  # of each kind
BOUNDS = Bounds(WorkerLimits(100_000, 16, 64, max_step_tokens=2048, max_batch=128), longest=8192)
A40 = Gpu("A40", 48, 696, 149.7, 84, 25, bandwidth_share=0.78, tflops_share=0.74)  # gave its shares to the L40S
LINEAR_GPUS = {"a100": GPUS["a100-80"], "h100": GPUS["h100"], "a40": A40}
LINEAR_MODELS = {
    "Llama-2-7b-hf": "llama-2-7b",
    "Llama-2-70b-hf": "llama-2-70b",
    "CodeLlama-34b-Instruct-hf": "codellama-34b",
    "Meta-Llama-3-8B": "llama-3.1-8b",
    "Meta-Llama-3-70B": "llama-3.1-70b",
}
FITTED = ("llama-2-7b", 1)  # the linear layers, and their GPUs, to which the shares were fitted
STEP_MODELS = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
MOST_TOKENS = 4096
Row = Mapping[str, str]


def truth_of(device: Device) -> GpuTruth:
    return GpuTruth(roofline.profile(device))


def against_shipped() -> None:
    for name in gpu_truth.names():
        measured = gpu_truth.load(name)
        computed = truth_of(described(measured.about))
        off = defaultdict[str, list[float]](list)
        for trial in random_trials(BOUNDS, STEPS, seed=1):
            off[trial.shape.kind.value].append(_seconds(computed, trial) / _seconds(measured, trial) - 1)
        for kind, errors in off.items():
            print_errors(f"{name}: {kind} steps", errors, in_goals=True)


def _seconds(truth: GpuTruth, trial: Trial) -> float:
    return truth.seconds_of(trial.chunks, trial.prefixes)


def against_linear(folder: Path) -> None:
    off = defaultdict[str, list[float]](list)
    for row in _rows(folder / "vidur_linear_per_layer.csv.gz"):
        tokens, ranks, model = int(row["num_tokens"]), int(row["tp"]), LINEAR_MODELS.get(row["model"])
        if model is None or tokens > MOST_TOKENS:
            continue
        device = Device(LINEAR_GPUS[row["gpu"]], MODELS[model], ranks)
        measured_us = 1000 * device.model.layers * float(row["layer_linear_ms_sum"])
        kind = "fitted" if (model, ranks) == FITTED else "not fitted"
        size = "1 to 64" if tokens <= 64 else "65 to 512" if tokens <= 512 else "more"
        error = Roofline(device).linear_us(tokens) / measured_us - 1
        off[f"linear layers, {row['gpu']}, {kind}, {size} tokens"].append(error)
    for name, errors in off.items():
        print_errors(name, errors)


def against_splitwise(folder: Path) -> None:
    """Compare with whole steps of vLLM of 2023; batches of 64 prompts, which did not run together, are left out."""
    steps = defaultdict[tuple[str, str, int, int, int], list[tuple[float, float]]](list)
    for row in _rows(folder / "splitwise_perf_model_measured.csv"):
        length, count, ranks = int(row["prompt_size"]), int(row["batch_size"]), int(row["tensor_parallel"])
        if row["token_size"] == "128" and count < 64:
            times = float(row["prompt_ms"]), float(row["token_ms"])
            steps[row["model"], row["hardware"], ranks, length, count].append(times)
    off = defaultdict[str, list[float]](list)
    for (model, gpu, ranks, length, count), measured in steps.items():
        device = Device(GPUS["a100-80" if gpu.startswith("a100") else "h100"], MODELS[STEP_MODELS[model]], ranks)
        prompts_ms, token_ms = (median(times) for times in zip(*measured, strict=True))
        name, truth = f"Splitwise, {model}, {ranks} x {gpu}", truth_of(device)
        off[f"{name}: prompts"].append(1e3 * truth.seconds_of([(length, 0)] * count, []) / prompts_ms - 1)
        off[f"{name}: a token"].append(1e3 * truth.seconds_of([], [length + 64] * count) / token_ms - 1)
    for name, errors in off.items():
        print_errors(name, errors)


def against_distserve(folder: Path) -> None:
    """Compare with the lines that DistServe fitted to its own engine and to vLLM, on A100s of 80 GB."""
    for engine in ("distserve", "vllm"):
        tree = json.loads((folder / f"distserve_profiler-a100-80g.{engine}.json").read_text(encoding="utf-8"))
        for model, by_ranks in tree.items():
            for ranks, line in by_ranks.items():
                truth = truth_of(Device(GPUS["a100-80"], MODELS[_short(model)], int(ranks)))
                name = f"DistServe, steps of {engine}, {_short(model)}, {ranks} x A100"
                print_errors(f"{name}: prompts", _prompts(truth, line["prefill"]))
                print_errors(f"{name}: a token", _decodes(truth, line))


def _prompts(truth: GpuTruth, line: list[float]) -> Iterator[float]:
    fixed, token, square = line
    for length in (128, 256, 512, 1024, 2048):
        measured_ms = fixed + token * length + square * length * length
        yield 1e3 * truth.seconds_of([(length, 0)], []) / measured_ms - 1


def _decodes(truth: GpuTruth, line: Mapping[str, list[float]]) -> Iterator[float]:
    """Yield errors for small batches; lines of the large batches do not fit their own times well."""
    fixed, prefix_token, request = line["decoding_smallbs"]
    for count in (1, 8, 32, 64):
        for prefix in (256, 1024):
            measured_ms = fixed + prefix_token * prefix * count + request * count
            yield 1e3 * truth.seconds_of([], [prefix] * count) / measured_ms - 1


def against_sarathi(folder: Path) -> None:
    """Compare with whole steps of Yi-34B on two A100s; the prefixes of its decodes are not known."""
    truth = truth_of(Device(GPUS["a100-80"], MODELS["yi-34b"], 2))
    off = [
        truth.seconds_of([(int(row["batch_num_tokens"]), 0)], []) / float(row["batch_execution_time"]) - 1
        for row in _rows(folder / "sarathi_yi34b_2xa100_prefill.csv")
    ]
    print_errors("Sarathi, Yi-34B, 2 x A100: prompts", off)


def against_room(folder: Path) -> None:
    off = []
    for row in _rows(folder / "distserve_max_num_tokens.csv"):
        try:
            device = Device(GPUS["a100-80"], MODELS[_short(row["model"])], int(row["tp"]))
            off += [device.kv_tokens / int(row["max_num_tokens"]) - 1] * (row["pp"] == "1")
        except ProfileError:  # it does not fit without pipeline parallelism
            continue
    print_errors("DistServe, OPT on A100s: tokens that memory holds", off)


def _short(model: str) -> str:
    return model.rpartition("/")[2]


def _rows(path: Path) -> Iterator[Row]:
    packed = path.read_bytes()
    yield from csv.DictReader((gzip.decompress(packed) if path.suffix == ".gz" else packed).decode().splitlines())


def print_errors(name: str, errors: Iterable[float], in_goals: bool = False) -> None:
    """Print the median error with its sign, and the median and the 90th percentile of its size."""
    signed = [100 * error for error in errors]
    sizes = sorted(map(abs, signed))
    report(f"{name}: off by, median", median(signed), "%")
    report(f"{name}: size of the error, median", median(sizes), "%", goal=MEDIAN if in_goals else None)
    report(f"{name}: size of the error, p90", sizes[len(sizes) * 9 // 10], "%", goal=P90 if in_goals else None)


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--times", type=Path, metavar="FOLDER", help="measured times: ../shared/traces/gpu_times")
    given = parser.parse_args()
    against_shipped()
    if given.times:
        for against in (against_linear, against_splitwise, against_distserve, against_sarathi, against_room):
            against(given.times)
    return status()


if __name__ == "__main__":
    raise SystemExit(main())
