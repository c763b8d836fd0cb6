"""Measure what adapters (LoRA) add to a step: 32 decodes with eight adapters of rank 16, with one for all, with none.

    python -m lab.benchmarks.lora                       # a Llama of 160 M, adapters of all its linear layers: a minute
    python -m lab.benchmarks.lora --layers q,v          # adapters of some layers only
    python -m lab.benchmarks.lora --dtype float32
    python -m lab.benchmarks.lora --quantization int8   # of the model; adapters stay in 16 bits

The kinds of steps take turns, step by step, so slow phases of the machine affect all alike; a figure is the median. The
exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from safetensors.torch import save_file

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization
from alignedserve.core import Adapter, Chunk, Decode, Sampling, StepPlan
from alignedserve.engine.adapters.lora import CONFIG, WEIGHTS, LoraFiles, linear_shapes, read_lora
from alignedserve.engine.engine import Engine
from alignedserve.executor.loading import use_threads
from alignedserve.lab.benchmarks.common.models import MAKERS, VOCAB
from alignedserve.lab.benchmarks.common.report import command, report, several, status

BLOCK, PROMPT, WARM = 16, 64, 8
EIGHT_RATIO, ONE_RATIO = 1.15, 1.05
_GREEDY = Sampling()


def make_adapter(folder: Path, model: Path, rank: int, layers: Sequence[str], seed: int) -> Adapter:
    """Write an adapter of random numbers in PEFT's format, and return it as requests name it."""
    generator, config, tensors = torch.Generator().manual_seed(seed), read_config(model), {}
    for layer, (outputs, inputs) in linear_shapes(config).items():
        if not layers or any(layer.endswith(f"{name}_proj") for name in layers):
            for name, shape in zip(LoraFiles.tensor_names(layer), ((rank, inputs), (outputs, rank)), strict=True):
                tensors[name] = (0.02 * torch.randn(shape, generator=generator)).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return Adapter(folder.name, str(folder), read_lora(folder, config).id)


class Steps:
    """Decodes of so many requests, whose prompts are in the cache; each step is timed."""

    def __init__(self, engine: Engine, batch: int, steps: int) -> None:
        self._engine, self._number, self._index = engine, 0, 1
        per_request, draw = -(-(PROMPT + steps + 1) // BLOCK), random.Random(0)
        self._pairs = [tuple(range(i * per_request, (i + 1) * per_request)) for i in range(batch)]
        for number, pairs in enumerate(self._pairs):
            tokens = tuple(draw.choices(range(10, VOCAB), k=PROMPT))
            self._run((Chunk(str(number), tokens, 0, pairs, _GREEDY),), ())

    def step(self, adapters: Sequence[Adapter | None]) -> float:
        """Run a step of all requests, of which each has one of these adapters, and return its seconds."""
        start = PROMPT + self._index - 1
        decodes = [
            Decode(str(i), 10 + i, start, pairs, _GREEDY, self._index, adapter=adapters[i % len(adapters)])
            for i, pairs in enumerate(self._pairs)
        ]
        began = perf_counter()
        self._run((), tuple(decodes))
        return perf_counter() - began

    def _run(self, chunks: tuple[Chunk, ...], decodes: tuple[Decode, ...]) -> None:
        self._number += 1
        self._engine.step(StepPlan(self._number, chunks, decodes))


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--model", choices=[*MAKERS], default="llama160m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="decodes of a step")
    parser.add_argument("--layers", type=several(str), default=[], help="such as q,v (default: all linear layers)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quantization", type=Quantization, choices=[*Quantization], default=Quantization.NONE)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each kind")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    for name in ("rank", "adapters", "batch", "rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    use_threads(args.threads, workers=1)
    with TemporaryDirectory() as above:
        folder, steps = MAKERS[args.model](Path(above) / "model"), 3 * (args.rounds + WARM)
        pairs = args.batch * -(-(PROMPT + steps + 1) // BLOCK)
        engine = Engine(
            folder,
            num_pairs=pairs,
            block_size=BLOCK,
            dtype=args.dtype,
            quantization=args.quantization,
            tune_s=0.4,
        )
        several_adapters = [
            make_adapter(Path(above) / f"a{i}", folder, args.rank, args.layers, i) for i in range(args.adapters)
        ]
        kinds: list[tuple[str, float | None, Sequence[Adapter | None]]] = [
            ("no adapter", None, [None]),
            (f"{args.adapters} adapters", EIGHT_RATIO, several_adapters),
            ("one adapter", ONE_RATIO, several_adapters[:1]),
        ]
        running = Steps(engine, args.batch, steps)
        for _ in range(WARM):
            for _, _, adapters in kinds:
                running.step(adapters)
        times: list[list[float]] = [[] for _ in kinds]
        for _ in range(args.rounds):
            for own, (_, _, adapters) in zip(times, kinds, strict=True):
                own.append(running.step(adapters))
        plain_s = median(times[0])
        for own, (what, goal, _) in zip(times, kinds, strict=True):
            name = f"{args.model}, {args.batch} decodes, {what} of rank {args.rank}"
            limit = None if goal is None else goal * plain_s * 1e3
            report(name, median(own) * 1e3, "ms", baseline=None if goal is None else plain_s * 1e3, goal=limit)
    sys.exit(status())


if __name__ == "__main__":
    main()
