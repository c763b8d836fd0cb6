"""Measure another key's first tokens beside the floods of hostile.py, simulated: no client, gateway or worker takes a
core of another.

    python -m lab.benchmarks.floods [--only chats,sessions] [--devices zen5] [--keys 2] [--seeds 0,1]

Chats of one key, four a second, run alone and beside each flood of another key, on one worker: a CPU with the steps of
a Zen 5, which can pause between 12 layers, and an RTX 4090 with Llama-3.1-8B. Floods are those that a worker sees:
`logprobs` are chats of 16 clients, `choices` of 128. A row is the 95th percentile of the time to the first token
against the same chats alone; chats that were not served; and the work conserved, in which a token counts as the
worker's time that it takes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alignedserve.lab.benchmarks.common.chat_loads import GPU
from alignedserve.lab.benchmarks.common.machines import MACHINES, save_profile
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.simulating import of_each, recorded, save_load
from alignedserve.lab.benchmarks.hostile import CLIENTS, CONSERVED, MOST_TIMES
from alignedserve.lab.loads.figures.request_figures import finished, ttft_s
from alignedserve.lab.loads.records.distribution import percentile
from alignedserve.lab.loads.records.records import RequestRecord
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.trials.building import settings_of

CPU, LAYERS = "zen5", 12
CPU_MACHINE = MACHINES[CPU]
WARM_S, SECONDS = 3.0, 20.0
GUESTS = {"name": "chats", "caller": "ann", "prompt": 11, "output": 8, "rate": 4, "cv": 0.3, "num_requests": 100_000}
FLOOD = {"name": "flood", "caller": "bob", "arrivals": "closed", "replace": True, "num_requests": 1_000_000}
FLOODS: Mapping[str, Mapping[str, Any]] = {
    "one_stream": {"prompt": 11, "output": 200, "in_flight": 1},
    "logprobs": {"prompt": 11, "output": 200, "in_flight": 16},
    "chats": {"prompt": 11, "output": 200, "in_flight": CLIENTS},
    "choices": {"prompt": 11, "output": 200, "in_flight": 128},
    "aborts": {"prompt": 11, "output": 200, "in_flight": CLIENTS, "leaving_share": 1, "patience_s": 0.1},
    "documents": {"service": "be", "prompt": 600, "output": 100, "in_flight": CLIENTS},
    "long_prompts": {"prompt": 1500, "output": 2, "in_flight": CLIENTS},
    "sessions": {"prompt": 16, "output": 60, "turns": 6, "think_s": 0.001, "in_flight": CLIENTS},
}


@dataclass(frozen=True)
class FloodRun:
    guests: tuple[RequestRecord, ...]
    tokens_s: float  # of the flood
    guests_s: float  # from arrival to last token, of all guests in a second


def run(trial: SimulationTrial) -> FloodRun:
    settings = settings_of(trial)
    record = recorded(Simulation(replace(settings, layers=LAYERS if Path(trial.profile or "").exists() else 0)))
    since, until = record.began_at + WARM_S, record.began_at + SECONDS
    guests = [each for each in record.requests if each.id.startswith("chats") and each.arrival_at >= since]
    tokens = sum(since <= at < until for each in record.requests if each.id.startswith("flood") for at in each.token_at)
    guests_s = sum(each.token_at[-1] - each.arrival_at for each in finished(guests))
    return FloodRun(tuple(guests), tokens / (until - since), guests_s / (until - since))


def runs(folder: Path, device: str, seeds: Sequence[int], *streams: Mapping[str, Any]) -> list[FloodRun]:
    """Run these streams on a worker of this device, once for each seed."""
    profile, load = folder / "cpu.json", folder / "load.yaml"
    if device == CPU:
        save_profile(profile, replace(CPU_MACHINE, limits=replace(CPU_MACHINE.limits, max_batch=CLIENTS)))
    saved = save_load(load, SECONDS, *map(dict, streams))
    trial = SimulationTrial("aligned", saved, profile=str(profile) if device == CPU else device)
    return of_each(run, [replace(trial, seed=seed) for seed in seeds])


def first_token_ms(ran: Iterable[FloodRun]) -> float:
    """Return the 95th percentile of the guests' time to the first token."""
    return 1e3 * percentile([ttft_s(guest) for one in ran for guest in finished(one.guests)], 95)


def flood_of(name: str, keys: int) -> list[Mapping[str, Any]]:
    """Return the streams of a flood, one of each key."""
    flood: dict[str, Any] = {**FLOOD, **FLOODS[name]}
    flood["in_flight"] = max(1, flood["in_flight"] // keys)
    return [{**flood, "name": f"flood{key or ''}", "caller": f"bob{key or ''}"} for key in range(keys)]


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--only", type=several(str, FLOODS), default=list(FLOODS), help="default: all")
    parser.add_argument("--devices", type=several(str, (CPU, GPU)), default=[CPU, GPU], help="default: both")
    parser.add_argument("--keys", type=int, default=1, help="that a flood is split over; default: 1")
    parser.add_argument("--seeds", type=several(int), default=[0, 1], help="default: 0,1")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        for device in args.devices:
            play = partial(runs, Path(folder), device, args.seeds)
            guests = play(GUESTS)
            for name in args.only:
                floods = flood_of(name, args.keys)
                tell(f"{device}, beside {name}", guests, play(*floods), play(GUESTS, *floods))
    return status()


def tell(label: str, guests: list[FloodRun], floods: list[FloodRun], both: list[FloodRun]) -> None:
    alone_ms, beside_ms = map(first_token_ms, (guests, both))
    report(f"{label}, first token, p95", beside_ms, "ms", baseline=alone_ms, goal=MOST_TIMES * alone_ms)
    lost = sum(len(one.guests) - len(finished(one.guests)) for one in both)
    report(f"{label}, chats not served", lost, "", goal=0)
    tokens_s, alone_s = (sum(one.tokens_s for one in runs) / len(runs) for runs in (both, floods))
    report(f"{label}, of the flood", tokens_s, "tokens/s", baseline=alone_s)
    share = tokens_s / alone_s + sum(one.guests_s for one in guests) / len(guests)
    report(f"{label}, work conserved", share, "", goal=CONSERVED, at_least=True)


if __name__ == "__main__":
    raise SystemExit(main())
