"""Measure how grouping by length changes steps and throughput: `schedule.grouping` aligned against fcfs.

    python -m lab.benchmarks.grouping [--seeds 0] [--loads long,mixed] [--pools 4,16] [--cluster 1+1]
    python -m lab.benchmarks.grouping --backend real [--seeds 0,1,2] [--model FOLDER]

One prefill and one decode worker, on RTX 4090 with Llama-3.1-8B (42 k tokens of memory). Documents have 100 to 8,000
tokens, or one in ten has 2,000 to 8,000 among short documents; all are best-effort, and there are more than fit.
`--pools` is the size of the pool in devices. Unequal lengths cost the time measured on that GPU (bubble: measured), or
the most possible: a step takes as long as if all prefixes were as long as the longest (bubble: whole). A run takes
about 5 minutes of one core, however busy the machine is.

On real workers a random Llama of 160 M serves documents of 64 to 1,500 tokens, 1+1 and colocated, with device caches of
200 MB and a pool of four of them. A run takes about 50 s on two quiet cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from alignedserve.decode_worker.state import DecodeCore
from alignedserve.lab.benchmarks.common.models import VOCAB, llama160m
from alignedserve.lab.benchmarks.common.report import command, print_line, several
from alignedserve.lab.benchmarks.common.serving import Answer, ask, serve
from alignedserve.lab.benchmarks.common.simulating import recorded
from alignedserve.lab.devices import gpu_truth, hardware
from alignedserve.lab.devices.hardware import Hardware
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.trials.building import device_of, settings_of
from alignedserve.loads.records.distribution import percentile
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import Settings

_GPU = "rtx4090-llama-3.1-8b-tp1"
_LONGEST = 16_384  # tokens of the longest request among the steps that workers know at the start
_OUTPUT = "service=be,output=128-512"
LOADS = {
    "long": f"sizes:{_OUTPUT},prompt=100-8000,arrivals=closed,in_flight=200,replace=true,num_requests=600",
    "mixed": f"mix:{_OUTPUT},short=0.9,short_prompt=10-512,long_prompt=2000-8000,arrivals=at_once,num_requests=600",
}
_WHOLE = 1000  # thousandths of the time between the mean and the longest prefix


@cache
def device(bubble: str) -> Hardware:
    usual = device_of(SimulationTrial("aligned", profile=_GPU))
    if bubble == "measured":
        return usual
    tree: dict[str, Any] = json.loads((gpu_truth.FOLDER / f"{_GPU}.json").read_text(encoding="utf-8"))
    tree["skew_decode"]["values"] = [[_WHOLE] * len(row) for row in tree["skew_decode"]["values"]]
    return replace(usual, truth=gpu_truth.GpuTruth(tree))


def settings(load: str, cluster: str, grouping: str, bubble: str, pool: int, seed: int) -> Settings:
    options = (f"schedule.grouping={grouping}",)
    usual = settings_of(SimulationTrial("aligned", LOADS[load], cluster, seed, profile=_GPU, options=options))
    hardware_of_worker = device(bubble)
    return replace(
        usual,
        num_pages=pool * usual.topology.decode_workers * hardware_of_worker.kv_tokens // usual.limits.page_size,
        timing=hardware_of_worker,
        belief=partial(
            hardware.belief, hardware_of_worker.truth, usual.limits, min(_LONGEST, hardware_of_worker.kv_tokens)
        ),
    )


def measured_line(load: str, cluster: str, grouping: str, bubble: str, pool: int, seed: int) -> dict[str, object]:
    simulation = Simulation(settings(load, cluster, grouping, bubble, pool, seed))
    record = recorded(simulation)
    figures = RunFigures.from_record(record)
    steps = [step for step in record.steps if step.shape.decodes]
    cores = [process.core for process in simulation.world.processes if isinstance(process.core, DecodeCore)]
    tokens = sum(step.shape.decodes for step in steps)
    num_steps = sum(core.counts.decode_steps for core in cores)
    found = {
        "spread": figures.steps.spread.mean,
        "bubble_share": figures.steps.spread.bubble_share,
        "decodes": tokens / len(steps),
        "step_ms": 1e3 * mean(step.seconds for step in steps),
        "ms_per_token": 1e3 * sum(step.seconds for step in steps) / tokens,
        "tokens_per_s": figures.be.tokens_per_s,
        "mixed_share": sum(core.counts.mixed_steps for core in cores) / max(1, num_steps),
        "batches": sum(core.counts.switches for core in cores),
    }
    line: dict[str, object] = {"name": f"grouping/{load}", "cluster": cluster, "grouping": grouping, "bubble": bubble}
    return line | {"pool": pool, "seed": seed} | found


# --- Real workers

_KV_MB, _POOLS = 200, 4  # of a device, and how many devices' caches the pool holds
_REQUESTS, _AT_ONCE = 40, 24


def served_line(model: Path, cluster: str, grouping: str, seed: int) -> dict[str, object]:
    flags = ("--topology", cluster, "--kv-memory-mb", str(_KV_MB), "--pool-memory-mb", str(_POOLS * _KV_MB))
    with serve(model, *flags, "--set", f"schedule.grouping={grouping}") as deployment:
        asyncio.run(ask(deployment.url, [3] * 20, 4))  # warms up
        began = perf_counter()
        answers = asyncio.run(_documents(deployment.url, Random(seed)))
        seconds = perf_counter() - began
        steps = _steps_by_batches(deployment.url)
    gaps = [gap for answer in answers for gap in answer.gaps]
    found = {
        "tokens_per_s": sum(answer.num_tokens for answer in answers) / seconds,
        "tpot_ms_p50": 1e3 * percentile(gaps, 50),
        "tpot_ms_p99": 1e3 * percentile(gaps, 99),
        "mixed_share": steps.get("2+", 0.0) / max(1.0, sum(steps.values())),
    }
    return {"name": "grouping/served", "cluster": cluster, "grouping": grouping, "seed": seed, **found}


async def _documents(url: str, draw: Random) -> list[Answer]:
    """Return the answers to documents of which so many are open at once."""
    asked = [(draw.randint(64, 1_500), draw.randint(32, 96)) for _ in range(_REQUESTS)]
    prompts = [([draw.randrange(3, VOCAB) for _ in range(size)], most) for size, most in asked]
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(prompt: list[int], most: int) -> Answer:
        async with room:
            return await ask(url, prompt, most, service_tier="flex")

    return list(await asyncio.gather(*(one(*asked) for asked in prompts)))


def _steps_by_batches(url: str) -> dict[str, float]:
    """Return the decode steps so far, by how many batches of the pool had members in them."""
    shown = httpx.get(f"{url}/metrics").text
    return {
        sample.labels["batches"]: sample.value
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
        if sample.name.endswith("decode_steps_total")
    }


def served_lines(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    with TemporaryDirectory() as folder:
        model = args.model or llama160m(Path(folder) / "model")
        for seed, cluster in product(args.seeds, ("1+1", "colocated")):
            for grouping in ("aligned", "fcfs")[:: -1 if seed % 2 else 1]:
                yield served_line(model, cluster, grouping, seed)


# --- Simulated


def lines(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    bubbles, groupings = ("measured", "whole"), ("aligned", "fcfs")
    for load, bubble, pool, seed, grouping in product(args.loads, bubbles, args.pools, args.seeds, groupings):
        yield measured_line(load, args.cluster, grouping, bubble, pool, seed)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--seeds", type=several(int), default=[0], help="default: %(default)s")
    parser.add_argument("--loads", type=several(str, LOADS), default=list(LOADS), help="default: %(default)s")
    parser.add_argument("--pools", type=several(int), default=[4, 16], help="sizes of the pool, in devices' KV memory")
    parser.add_argument("--cluster", default="1+1", help="default: %(default)s")
    parser.add_argument("--backend", choices=("real", "simulated"), default="simulated", help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="real: a model folder, in place of random weights")
    args = parser.parse_args()
    for line in served_lines(args) if args.backend == "real" else lines(args):
        print_line(line)


if __name__ == "__main__":
    main()
