"""Measure how fast and how exact the simulator is: `python -m benchmarks.simulator [--full]`.

The real cores run every step; none is merged or skipped. The default takes about a minute; --full adds an hour of chat
on eight workers, and a thousand workers, with a profile of the time. --trace and --measured are the arrivals and the
times of a real vLLM run.
"""

from __future__ import annotations

import csv
import resource
from collections import defaultdict
from cProfile import Profile
from pathlib import Path
from statistics import mean
from time import perf_counter, process_time

from alignedserve.cli.simulate_once import settings_of
from alignedserve.simulator.records.records import RunRecord
from alignedserve.simulator.reports.figures import RunFigures
from alignedserve.simulator.reports.trial import SimulationTrial
from alignedserve.simulator.run import Simulation
from benchmarks.common.simulating import record_of
from benchmarks.report import command, report

_MIB = 1024  # KiB, as getrusage counts


def steps_per_second(running: int, seconds: float, goal: float) -> None:
    """Time a worker on which this many requests decode all the time."""
    lot = f"sizes:prompt=64,output=1000,arrivals=closed,in_flight={running},replace=true,first_s={seconds:g}"
    simulation = Simulation(settings_of(SimulationTrial("aligned", lot)))
    simulation.run()  # the first run also makes the profile with which workers start
    simulation = Simulation(settings_of(SimulationTrial("aligned", lot)))
    began = process_time()
    simulation.run()
    took = process_time() - began
    steps = len(simulation.record(took).steps)
    report(f"simulated steps a second, {running} running", steps / took, "1/s", goal=goal, at_least=True)


def hour_of_chat(minutes: float) -> None:
    trial = SimulationTrial("aligned", f"chat,rate=5.5,first_s={60 * minutes:g}", "8xcolocated")
    took = _timed(trial)
    report(f"{minutes:g} minutes of 5.5 chats a second on 8 workers, as an hour", took * 60 / minutes, "s", goal=600)


def many_workers(number: int, seconds: float) -> None:
    """Time workers with a request per second each."""
    simulation = Simulation(settings_of(_each_with_one(number, seconds)))
    began = process_time()
    simulation.run()
    took = process_time() - began
    record = simulation.record(took)
    what = f"{seconds:g} s of {number:,} requests a second on {number:,} workers"
    report(what, took, "s of one core", goal=600)
    report(f"{what}: steps", len(record.steps) / took, "1/s")
    began = process_time()
    RunFigures.from_record(record)
    report(f"{what}: their figures", process_time() - began, "s of one core")
    report(f"{what}: memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MIB, "MiB", goal=8192)


def where_time_goes(number: int, seconds: float) -> None:
    """Report each folder's share of the time by cProfile, which overstates small functions."""
    simulation = Simulation(settings_of(_each_with_one(number, seconds)))
    profile = Profile(builtins=False)
    profile.runcall(simulation.run)
    seconds_in: defaultdict[str, float] = defaultdict(float)
    for entry in profile.getstats():
        if not isinstance(entry.code, str):
            seconds_in[_part_of(Path(entry.code.co_filename))] += entry.inlinetime
    for part, own in sorted(seconds_in.items(), key=lambda item: -item[1]):
        what = f"{seconds:g} s of {number:,} requests a second on {number:,} workers: {part}"
        report(what, 100 * own / sum(seconds_in.values()), "% of the time")


def _each_with_one(number: int, seconds: float) -> SimulationTrial:
    return SimulationTrial("aligned", f"chat,rate={number},first_s={seconds:g}", f"{number}xcolocated")


def _part_of(path: Path) -> str:
    """Return the folder of a file, within the package if the file is in the package."""
    parts = path.parts
    return (
        "/".join(parts[len(parts) - parts[::-1].index("alignedserve") : -1]) if "alignedserve" in parts else path.stem
    )


def _timed(trial: SimulationTrial) -> float:
    began = perf_counter()
    record_of(trial)
    return perf_counter() - began


# --- Against a real run


def against_vllm(trace: Path, measured: Path) -> None:
    """Simulate vLLM with chunked prefill and 128 sequences: its requests never wait while fewer run."""
    record = record_of(SimulationTrial("vllm-chunked", f"trace:{trace}"))
    real = list(csv.DictReader(measured.open(encoding="utf-8")))
    ttft = [float(row["ttft_s"]) for row in real]
    whole = [float(row["e2e_s"]) for row in real]
    tpot = [(e - t) / (int(row["output_tokens"]) - 1) for row, e, t in zip(real, whole, ttft, strict=True)]
    simulated = _means(record)
    for name, times, mine in zip(("TTFT", "TPOT", "end to end"), (ttft, tpot, whole), simulated, strict=True):
        off = abs(mine / mean(times) - 1)
        report(f"mean {name}, simulated against measured", 100 * off, "% off", goal=15)


def _means(record: RunRecord) -> tuple[float, float, float]:
    done = [(request.arrival_at, request.token_at) for request in record.requests if request.token_at]
    ttft = [tokens[0] - at for at, tokens in done]
    whole = [tokens[-1] - at for at, tokens in done]
    tpot = [(tokens[-1] - tokens[0]) / (len(tokens) - 1) for _, tokens in done if len(tokens) > 1]
    return mean(ttft), mean(tpot), mean(whole)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--full", action="store_true", help="an hour on 8 workers, and 1,000 workers")
    parser.add_argument("--trace", type=Path, help="arrivals of a real run, such as llmservingsim_sharegpt300.csv")
    parser.add_argument("--measured", type=Path, help="its times, such as vllm_measured_RTXPRO6000_Llama-3.1-8B.csv")
    given = parser.parse_args()
    steps_per_second(8, 240, goal=10_000)
    steps_per_second(128, 60, goal=1_500)
    if given.trace and given.measured:
        against_vllm(given.trace, given.measured)
    if given.full:
        hour_of_chat(60)
        many_workers(1000, 60)
        where_time_goes(1000, 2)
    else:
        hour_of_chat(5)


if __name__ == "__main__":
    main()
