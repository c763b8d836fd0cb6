"""How fast the simulator is, and how near to what was measured: `python -m benchmarks.simulator [--full]`.

Steps are those of the real cores, none merged or skipped. The default takes about a minute; --full adds an hour of chat
on eight workers, and a thousand workers, with where their time goes. --trace and --measured are the arrivals and the
times of a real vLLM run.
"""

from __future__ import annotations

import argparse
import csv
import resource
from collections import defaultdict
from cProfile import Profile
from pathlib import Path
from statistics import mean
from time import perf_counter, process_time
from types import MappingProxyType

from alignedserve.cli.simulate_once import run_once, settings_of
from alignedserve.simulator.records.records import RunRecord
from alignedserve.simulator.reports.figures import Figures
from alignedserve.simulator.reports.trial import Trial
from alignedserve.simulator.run import Simulation
from benchmarks.report import command, report

_MIB = 1024  # KiB, as getrusage counts


def steps_per_second(running: int, seconds: float, goal: float) -> None:
    """So many requests decode all the time on one worker."""
    lot = f"sizes:prompt=64,output=1000,arrivals=closed,in_flight={running},replace=true,first_s={seconds:g}"
    simulation = Simulation(settings_of(Trial("aligned", lot)))
    simulation.run()  # the first run also makes the profile that workers start with
    simulation = Simulation(settings_of(Trial("aligned", lot)))
    began = process_time()
    simulation.run()
    took = process_time() - began
    steps = len(simulation.record(took).steps)
    report(f"simulated steps a second, {running} running", steps / took, "1/s", goal=goal, at_least=True)


def hour_of_chat(minutes: float) -> None:
    trial = Trial("aligned", f"chat,rate=5.5,first_s={60 * minutes:g}", "8xcolocated")
    took = _timed(trial)
    report(f"{minutes:g} minutes of 5.5 chats a second on 8 workers, as an hour", took * 60 / minutes, "s", goal=600)


def many_workers(number: int, seconds: float) -> None:
    """Each with a request a second."""
    simulation = Simulation(settings_of(_each_with_one(number, seconds)))
    began = process_time()
    simulation.run()
    took = process_time() - began
    record = simulation.record(took)
    what = f"{seconds:g} s of {number:,} requests a second on {number:,} workers"
    report(what, took, "s of one core", goal=600)
    report(f"{what}: steps", len(record.steps) / took, "1/s")
    began = process_time()
    Figures.of(record)
    report(f"{what}: their figures", process_time() - began, "s of one core")
    report(f"{what}: memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MIB, "MiB", goal=8192)


def where_time_goes(number: int, seconds: float) -> None:
    """By cProfile, under which small functions weigh more than they do without."""
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


def _each_with_one(number: int, seconds: float) -> Trial:
    return Trial("aligned", f"chat,rate={number},first_s={seconds:g}", f"{number}xcolocated")


_LINKS, _ENGINE, _RECORD, _CHOICE = "processes, links and time", "engine model", "recorder", "choice of what runs"
_PARTS = MappingProxyType(
    {
        "cost_fit": "learning what steps take",
        **dict.fromkeys(("cost", "selection", "chunks", "slo", "promise"), _CHOICE),
        **dict.fromkeys(("world", "clock", "trouble", "membership"), _LINKS),
        **dict.fromkeys(("gpu_truth", "engine", "hardware"), _ENGINE),
        **dict.fromkeys(("recorder", "step_log"), _RECORD),
        "owner": "gateway's core",
    }
)


def _part_of(path: Path) -> str:
    """Of the program, by the file."""
    if path.parent.name == "router":
        return "router's core"
    if path.stem in _PARTS:
        return _PARTS[path.stem]
    return "clients and their workload" if "simulator" in path.parts else "what else workers' cores do"


def _timed(trial: Trial) -> float:
    began = perf_counter()
    run_once(trial, lambda _ended, _of: None)
    return perf_counter() - began


# --- Against a real run


def against_vllm(trace: Path, measured: Path) -> None:
    """vLLM with chunked prefill and 128 sequences: its requests never wait while fewer run."""
    record = run_once(Trial("vllm-chunked", f"trace:{trace}"), lambda _ended, _of: None)
    real = list(csv.DictReader(measured.open(encoding="utf-8")))
    ttft = [float(one["ttft_s"]) for one in real]
    whole = [float(one["e2e_s"]) for one in real]
    tpot = [(e - t) / (int(one["output_tokens"]) - 1) for one, e, t in zip(real, whole, ttft, strict=True)]
    simulated = _means(record)
    for name, times, mine in zip(("TTFT", "TPOT", "end to end"), (ttft, tpot, whole), simulated, strict=True):
        off = abs(mine / mean(times) - 1)
        report(f"mean {name}, simulated against measured", 100 * off, "% off", goal=15)


def _means(record: RunRecord) -> tuple[float, float, float]:
    done = [one for one in record.requests if one.token_at]
    ttft = [one.token_at[0] - one.arrival_at for one in done]
    whole = [one.token_at[-1] - one.arrival_at for one in done]
    tpot = [(one.token_at[-1] - one.token_at[0]) / (len(one.token_at) - 1) for one in done if len(one.token_at) > 1]
    return mean(ttft), mean(tpot), mean(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
