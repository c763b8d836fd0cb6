"""Measure how grouping by length changes steps and throughput: `schedule.grouping` aligned against fcfs, simulated.

    python -m benchmarks.grouping [--seeds 0] [--loads long,mixed] [--pools 4,16] [--cluster 1+1]

One prefill and one decode worker, on RTX 4090 with Llama-3.1-8B (42 k tokens of memory). Documents have 100 to 8,000
tokens, or one in ten has 2,000 to 8,000 among short documents; all are best-effort, and there are more than fit.
`--pools` is the size of the pool in devices. Unequal lengths cost the time measured on that GPU (bubble: measured), or
the most possible: a step takes as long as if all prefixes were as long as the longest (bubble: whole). A run takes
about 5 minutes of one core, however busy the machine is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from statistics import mean
from typing import Any

from alignedserve.cli.simulate_once import device_of, settings_of
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.simulator.machines import gpu_truth, hardware
from alignedserve.simulator.machines.hardware import Hardware
from alignedserve.simulator.reports.figures import RunFigures
from alignedserve.simulator.reports.trial import SimulationTrial
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import Settings
from benchmarks.common.simulating import recorded
from benchmarks.report import command, print_line, several

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
    for line in lines(parser.parse_args()):
        print_line(line)


if __name__ == "__main__":
    main()
