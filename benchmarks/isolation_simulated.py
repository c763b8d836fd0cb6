"""What `benchmarks.isolation` measures, simulated: chats with three promises beside documents that are always there.

    python -m benchmarks.isolation_simulated [--machine zen4] [--speed 1] [--off 0.04,0.12] [--seeds 0,1,2]
        [--seconds 40] [--rate 2]

Steps take what such a worker measured of itself on two quiet cores of a Zen 4 or a Zen 5 (docs/how/packing.md), times
--speed, and are off from predictions as much as --off says: in the median and at the 90th percentile. No engine runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import yaml

from alignedserve.cli.simulate_once import run_once
from alignedserve.core import ServiceClass, WorkerLimits
from alignedserve.cost.model import Coefficients, Uncertainty
from alignedserve.cost.profile import save
from alignedserve.simulator.reports.request_figures import attains, gaps_s, has_finished, ttft_s
from alignedserve.simulator.reports.trial import Trial
from benchmarks.isolation import DEFAULT, TIGHT, Promise, share
from benchmarks.packing import GATEWAY_MS, profile, workload
from benchmarks.report import report

HIDDEN_S = 35e-6
_DOCUMENTS = 32


@dataclass(frozen=True)
class Machine:
    step: Coefficients
    limits: WorkerLimits
    has_goals: bool = False  # of tokens in a second: they were set for such a one


_ZEN4_TOKENS = (0.0, 6e-5, 1.3e-4, 4.1e-4, 5.1e-4, 5.3e-4, 5.5e-4)
MACHINES = {
    "zen4": Machine(
        Coefficients(fixed=0.0088, token=_ZEN4_TOKENS, work=1.1e-7, cached=2.1e-6, decode=1.0e-4, prefix=1.85e-6),
        WorkerLimits(num_pairs=910, block_size=16, page_size=64, max_step_tokens=512, max_batch=64),
    ),
    "zen5": Machine(
        Coefficients(fixed=0.0075, token=(3.0e-4,), work=1.5e-8, chunk=3e-4, cached=1e-6, decode=1.0e-4, prefix=1.1e-6),
        WorkerLimits(num_pairs=3600, block_size=16, page_size=64, max_step_tokens=512, max_batch=16),
        has_goals=True,
    ),
}


@dataclass(frozen=True)
class Came:
    ttfts: Sequence[float]
    gaps: Sequence[float]
    num_chats: int
    attained: float
    tokens_s: float

    def in_time(self, promise: Promise) -> tuple[float, float]:
        first = sum(one <= promise.ttft_s for one in self.ttfts) / max(1, self.num_chats)
        return 100 * first, 100 * sum(one <= promise.tbt_s for one in self.gaps) / max(1, len(self.gaps))


class Simulated:
    def __init__(self, folder: Path, seconds: float, rate: float) -> None:
        self.steps, self._load = folder / "steps.json", folder / "load.yaml"
        self._seconds, self._rate = seconds, rate

    def run(self, promise: Promise, seed: int, streams: slice) -> Came:
        spec = yaml.safe_load(workload(self._rate, _DOCUMENTS, promise.ttft_s, promise.tbt_s))
        spec |= {"first_s": self._seconds, "streams": spec["streams"][streams]}
        self._load.write_text(yaml.safe_dump(spec), encoding="utf-8")
        trial = Trial("aligned", str(self._load), seed=seed, profile=str(self.steps), gateway_ms=GATEWAY_MS)
        record = run_once(trial, lambda _ended, _of: None)
        chats = [one for one in record.requests if one.service is ServiceClass.RT]
        ended = [one for one in chats if has_finished(one)]
        be = [one for one in record.requests if one.service is ServiceClass.BE and has_finished(one)]
        return Came(
            [ttft_s(one) for one in ended],
            [gap for one in ended for gap in gaps_s(one)],
            len(chats),
            100 * sum(map(attains, chats)) / max(1, len(chats)),
            sum(len(one.token_at) for one in be) / record.duration_s,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=MACHINES, default="zen4", help="default: %(default)s")
    parser.add_argument("--speed", type=float, default=1.0, help="times that steps take (default: %(default)s)")
    parser.add_argument("--off", default="0.04,0.12", help="of predictions (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2.0, help="chats in a second (default: %(default)s)")
    args = parser.parse_args()
    off, machine = Uncertainty(*map(float, args.off.split(","))), MACHINES[args.machine]
    found: dict[str, list[tuple[float, ...]]] = {}
    with TemporaryDirectory() as folder:
        simulated = Simulated(Path(folder), args.seconds, args.rate)
        save(profile(machine.limits, machine.step, HIDDEN_S, off, args.speed), simulated.steps)
        chats, documents, both = slice(0, 1), slice(1, 2), slice(0, 2)
        for seed in map(int, args.seeds.split(",")):
            alone, be = simulated.run(DEFAULT, seed, chats), simulated.run(DEFAULT, seed, documents)
            tbt_s, step_s = 1.20 * share(alone.gaps, 0.95), median(alone.gaps)
            own = Promise("own", 1.10 * share(alone.ttfts, 0.95) + step_s, tbt_s, 95.0, None)
            for promise in (own, TIGHT, DEFAULT):
                for name, streams in ((f"{promise.name}, alone", chats), (promise.name, both)):
                    came = simulated.run(promise, seed, streams)
                    lost = float(came.num_chats - len(came.ttfts))
                    row = (*came.in_time(promise), came.attained, lost, came.tokens_s, be.tokens_s)
                    found.setdefault(name, []).append(row)
    met = []
    for name, rows in found.items():
        first, gaps, attained, lost, tokens_s, alone_s = (mean(column) for column in zip(*rows, strict=True))
        goal = 95.0 if name == "own" else None
        met.append(report(f"{name}: first tokens in time", first, "%", goal=goal, at_least=True))
        met.append(report(f"{name}: gaps in time", gaps, "%", goal=goal, at_least=True))
        ours = {"tight": TIGHT, "default": DEFAULT}.get(name)
        least = None if ours is None else ours.least_attained
        met.append(report(f"{name}: attained", attained, "%", goal=least, at_least=True))
        if "alone" not in name:
            met.append(report(f"{name}: chats refused or failed", lost, "1", goal=0))
            has_goal = machine.has_goals and args.speed == 1
            least_s = ours.least_tokens_s if ours is not None and has_goal else None
            met.append(report(f"{name}: BE", tokens_s, "tokens/s", baseline=alone_s, goal=least_s, at_least=True))
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
