"""Measure how fast and how exact the simulator is: `python -m lab.benchmarks.simulator`, about a minute.

The real cores run every step; none is merged or skipped. --measured FILE compares with the times of a real run instead.
"""

from __future__ import annotations

import csv
import json
from math import isfinite, nan
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from alignedserve.core import ServiceClass, Slo
from alignedserve.lab.benchmarks.common.report import command, report
from alignedserve.lab.benchmarks.common.simulating import record_of
from alignedserve.lab.loads import defaults
from alignedserve.lab.loads.figures.request_figures import mean_tpot_s, ttft_s
from alignedserve.lab.loads.records.distribution import Distribution
from alignedserve.lab.loads.records.records import RequestRecord
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.trials.building import settings_of


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
    began = perf_counter()
    record_of(trial)
    took = perf_counter() - began
    report(f"{minutes:g} minutes of 5.5 chats a second on 8 workers, as an hour", took * 60 / minutes, "s", goal=600)


# --- Against a real run


def against_measured(measured: Path, profile: str, preset: str) -> None:
    """Simulate the requests of a real run. At most 128 run at once, the default of presets and of LLMServingSim."""
    requests = _read_jsonl(measured) if measured.suffix == ".jsonl" else _read_csv(measured)
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        lines = [f"{each.arrival_at:.6f},{each.num_prompt},{len(each.token_at)}" for each in requests]
        trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n", encoding="utf-8")
        simulated = record_of(SimulationTrial(preset, f"trace:{trace}", profile=profile)).requests
    for name, time_of in (("TTFT", ttft_s), ("TPOT", mean_tpot_s), ("end to end", _whole_s)):
        real, mine = (Distribution.from_values(filter(isfinite, map(time_of, run))) for run in (requests, simulated))
        report(f"{profile}, {name}: the mean is off by", 100 * abs(mine.mean / real.mean - 1), "%", goal=15)
        report(f"{profile}, {name}: mean", mine.mean, "s", baseline=real.mean)
        report(f"{profile}, {name}: median", mine.p50, "s", baseline=real.p50)
        report(f"{profile}, {name}: p90", mine.p90, "s", baseline=real.p90)
        report(f"{profile}, {name}: p99", mine.p99, "s", baseline=real.p99)


def _whole_s(request: RequestRecord) -> float:
    return request.token_at[-1] - request.arrival_at if request.token_at else nan


def _request(arrival_s: float, num_prompt: int, num_output: int, ttft_s: float, whole_s: float) -> RequestRecord:
    """Return a request with known times of the first and the last token."""
    token_at = [arrival_s + ttft_s] * (num_output - 1) + [arrival_s + whole_s]
    return RequestRecord("", ServiceClass.RT, Slo(), arrival_s, num_prompt, token_at)


def _read_csv(path: Path) -> list[RequestRecord]:
    with path.open(encoding="utf-8", newline="") as file:
        return [
            _request(
                float(row["arrival_s"]),
                int(row["prompt_tokens"]),
                int(row["output_tokens"]),
                float(row["ttft_s"]),
                float(row["e2e_s"]),
            )
            for row in csv.DictReader(file)
        ]


def _read_jsonl(path: Path) -> list[RequestRecord]:
    """Read requests as LLMServingSim writes them. Clients and engine have clocks of their own: the first request that
    is queued at once shows how far the clocks are apart."""
    rows = sorted(map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=itemgetter("arrival_time"))
    apart = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    return [
        _request(
            row["arrival_time"] - rows[0]["arrival_time"],
            row["input_toks"],
            row["output_toks"],
            row["first_token_ts"] - row["arrival_time"] - apart,
            row["last_token_ts"] - row["arrival_time"] - apart,
        )
        for row in rows
    ]


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of chat on 8 workers")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="only compare with this real run: LLMServingSim's requests.jsonl, or a CSV file of arrival_s,"
        " prompt_tokens, output_tokens, ttft_s, e2e_s",
    )
    parser.add_argument("--profile", default=defaults.PROFILE, help="the GPU and the model of the measured run")
    parser.add_argument("--preset", default="vllm-chunked", help="what served the measured run")
    given = parser.parse_args()
    if given.measured:
        against_measured(given.measured, given.profile, given.preset)
        return
    steps_per_second(8, 240, goal=10_000)
    steps_per_second(128, 60, goal=1_500)
    hour_of_chat(given.minutes)


if __name__ == "__main__":
    main()
