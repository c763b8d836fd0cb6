"""Measure the time and the memory that loading a model takes: `python -m lab.benchmarks.loading`, about a minute.

The models are two folders of random weights: 160 M numbers with as many heads for K and V as for queries, and 0.5 B
with few heads for K and V and a large vocabulary. The engine and transformers, the baseline, load each model in
separate processes and in turn; the fastest of three runs counts. Memory is the peak of the process above its memory
before. The engine's memory includes measuring and packing its linear layers, as a worker does; its seconds do not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from safetensors import safe_open

from alignedserve.lab.benchmarks.common.models import gqa500m, llama160m
from alignedserve.lab.benchmarks.common.report import command, report
from alignedserve.lab.benchmarks.common.serving import memory_mb

_RUNS = 3
_LOADERS = ("engine", "transformers")
_DTYPES = ("bfloat16", "float32")  # as stored, and converted
_SLACK = 0.05  # share of the weights, above the weights and their largest tensor
_MODELS = {"160 M": llama160m, "0.5 B": gqa500m}


def load(loader: str, folder: Path, dtype: str) -> None:
    """Print the seconds, and the MiB of the peak above the memory before."""
    target: torch.dtype = getattr(torch, dtype)
    if loader == "engine":
        from alignedserve.architectures.families.model_config import read_config
        from alignedserve.engine.models.families.choice import load_model
        from alignedserve.engine.models.loading import Loader
        from alignedserve.engine.weights.tensors import Tensors
        from alignedserve.kernels.common.fp8 import AnyQuantised
        from alignedserve.kernels.common.linear import Linear
        from alignedserve.kernels.dispatch.dispatcher import choose
        from alignedserve.kernels.dispatch.tuning import tune

        kernels = choose(torch.device("cpu"), target).kernels
        linears: list[Linear] = []

        def make_linear(weight: torch.Tensor | AnyQuantised, bias: torch.Tensor | None) -> Linear:
            assert isinstance(weight, torch.Tensor)
            linears.append(kernels.linear(weight, bias))
            return linears[-1]

        before, began = memory_mb(os.getpid(), "VmRSS"), perf_counter()
        with torch.inference_mode():
            model: object = load_model(read_config(folder), Loader(Tensors(folder), target, kernels, make_linear))
            took = perf_counter() - began
            tune(linears)
    else:
        from transformers import AutoModelForCausalLM

        before, began = memory_mb(os.getpid(), "VmRSS"), perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=target)
        took = perf_counter() - began
    print(json.dumps([took, memory_mb(os.getpid(), "VmHWM") - before]))
    del model


def numbers(folder: Path) -> list[int]:
    """Return the number of elements of each tensor."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return [torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys()]  # noqa: SIM118


def measure(name: str, folder: Path, dtype: str) -> None:
    size, sizes = torch.empty(0, dtype=getattr(torch, dtype)).itemsize, numbers(folder)
    seconds: dict[str, list[float]] = {loader: [] for loader in _LOADERS}
    peaks: dict[str, list[float]] = {loader: [] for loader in _LOADERS}
    for _ in range(_RUNS):
        for loader in _LOADERS:
            line = [sys.executable, "-m", "lab.benchmarks.loading", "--one", loader, str(folder), dtype]
            done = subprocess.run(line, check=True, capture_output=True, text=True)
            took, peak_mb = json.loads(done.stdout.splitlines()[-1])
            seconds[loader].append(took)
            peaks[loader].append(peak_mb * (1 << 20) / (size * sum(sizes)))
    report(f"{name} as {dtype}: load", min(seconds["engine"]), "s", baseline=min(seconds["transformers"]))
    # During its conversion, a tensor is in memory in both formats.
    goal = 1 + _SLACK + 2 * max(sizes) / (size * sum(sizes))
    peak, baseline = min(peaks["engine"]), min(peaks["transformers"])
    report(f"{name} as {dtype}: peak memory over the weights", peak, "share", baseline=baseline, goal=goal)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--one", nargs=3, metavar=("LOADER", "FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        loader, folder, dtype = options.one
        load(loader, Path(folder), dtype)
        return
    with TemporaryDirectory() as scratch:
        for name, make in _MODELS.items():
            folder = make(Path(scratch) / name.replace(" ", ""))
            for dtype in _DTYPES:
                measure(name, folder, dtype)


if __name__ == "__main__":
    main()
