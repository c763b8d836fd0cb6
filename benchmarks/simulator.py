"""How fast the simulator is, and how near to what was measured: `python -m benchmarks.simulator [--full]`.

Steps are those of the real cores, none merged or skipped. The default takes about a minute; --full adds an hour of chat
on eight workers, and a thousand workers. --trace and --measured are the arrivals and the times of a real vLLM run.
"""

from __future__ import annotations

import argparse
import csv
import resource
from pathlib import Path
from statistics import mean
from time import perf_counter, process_time

from alignedserve.simulate_once import run_once, settings_of
from alignedserve.simulator.records import RunRecord
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.trial import Trial
from benchmarks.report import report

_MIB = 1024  # KiB, as getrusage counts


def steps_per_second(running: int, seconds: float, goal: float) -> None:
    """So many requests decode all the time on one worker."""
    lot = f"sizes:prompt=64,output=1000,arrivals=closed,in_flight={running},replace=true,first_s={seconds:g}"
    simulation = Simulation(settings_of(Trial("slack", lot)))
    simulation.run()  # the first run also makes the profile that workers start with
    simulation = Simulation(settings_of(Trial("slack", lot)))
    began = process_time()
    simulation.run()
    took = process_time() - began
    steps = len(simulation.record(took).steps)
    report(f"simulated steps a second, {running} running", steps / took, "1/s", goal=goal, at_least=True)


def hour_of_chat(minutes: float) -> None:
    trial = Trial("slack", f"chat,rate=5.5,first_s={60 * minutes:g}", "8xcolocated")
    took = _timed(trial)
    report(f"{minutes:g} minutes of 5.5 chats a second on 8 workers, as an hour", took * 60 / minutes, "s", goal=600)


def thousand_workers(seconds: float) -> None:
    trial = Trial("slack", f"chat,rate=1000,first_s={seconds:g}", "1000xcolocated")
    report(f"{seconds:g} s of 1,000 requests a second on 1,000 workers", _timed(trial), "s")
    report("memory of that", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MIB, "MiB")


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
        thousand_workers(60)
    else:
        hour_of_chat(5)


if __name__ == "__main__":
    main()
