"""Is it the job runner that leaves a batch little beside chats? Simulated.

    python -m benchmarks.batch_isolation_simulated [--off 0.04,0.12] [--seeds 0,1,2]

The load of benchmarks/batch_isolation.py on the Zen 4 worker of benchmarks/isolation_simulated.py: documents' tokens in
a second while chats come, as requests of which so many are always there, and as lines that the job runner opens.
--off is how far steps are from predictions: in the median and at the 90th percentile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import yaml

from alignedserve.cli.simulate_once import settings_of
from alignedserve.core import ServiceClass
from alignedserve.cost.model import Uncertainty
from alignedserve.cost.profile import save
from alignedserve.simulator.batch_jobs import JobsSimulation, Submission
from alignedserve.simulator.reports.request_figures import attains
from alignedserve.simulator.reports.trial import Trial
from alignedserve.simulator.run import Simulation
from benchmarks.isolation import DEFAULT, TIGHT, Promise
from benchmarks.isolation_simulated import HIDDEN_S, MACHINES
from benchmarks.packing import GATEWAY_MS, profile, workload
from benchmarks.report import report

SECONDS, RATE = 60, 2.0  # of chats; counted from a third on
AT_ONCE = (8, 32)
LINES = 2_000  # more than are done


class Trials:
    def __init__(self, folder: Path, off: Uncertainty) -> None:
        self._steps, self._load = folder / "steps.json", folder / "load.yaml"
        machine = MACHINES["zen4"]
        save(profile(machine.limits, machine.step, HIDDEN_S, off), self._steps)

    def run(self, promise: Promise, seed: int, documents: int | None) -> tuple[float, float]:
        """(documents' tokens a second, per cent of chats that attain); without a number they are lines of a batch."""
        spec = yaml.safe_load(workload(RATE, documents or 1, promise.ttft_s, promise.tbt_s))
        streams = spec["streams"] if documents else spec["streams"][:1]
        self._load.write_text(yaml.safe_dump({"first_s": SECONDS, "streams": streams}), encoding="utf-8")
        settings = settings_of(
            Trial("aligned", str(self._load), seed=seed, profile=str(self._steps), gateway_ms=GATEWAY_MS)
        )
        jobs = [Submission("batch", LINES, SECONDS)]
        simulation = Simulation(settings) if documents else JobsSimulation(settings, jobs)
        simulation.run()
        requests = simulation.record(1.0).requests
        began_at = min(one.arrival_at for one in requests)
        tokens = [at - began_at for one in requests if one.service is ServiceClass.BE for at in one.token_at]
        chats = [one for one in requests if one.service is ServiceClass.RT]
        counted = sum(SECONDS / 3 <= at < SECONDS for at in tokens)
        return counted / (SECONDS * 2 / 3), 100 * sum(map(attains, chats)) / len(chats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--off", default="0.04,0.12", help="of predictions (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    with TemporaryDirectory() as folder:
        trials = Trials(Path(folder), Uncertainty(*map(float, args.off.split(","))))
        for promise in (TIGHT, DEFAULT):
            always_s = 0.0
            for documents in (*AT_ONCE, None):
                came = [trials.run(promise, seed, documents) for seed in seeds]
                tokens_s, attained = (mean(of) for of in zip(*came, strict=True))
                name = f"{promise.name}, {f'{documents} always there' if documents else 'lines of a batch'}"
                report(f"{name}: attained", attained, "%")
                report(f"{name}: BE while chats come", tokens_s, "tokens/s", baseline=always_s or None)
                always_s = max(always_s, tokens_s)


if __name__ == "__main__":
    main()
