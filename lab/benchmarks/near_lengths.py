"""Measure what it brings that decodes of near lengths share a step, against the same steps in order.

    python -m lab.benchmarks.near_lengths                             # about a minute of one core for each row and seed
    python -m lab.benchmarks.near_lengths --loads flow --clusters 1+1,2xcolocated --seeds 0,1,2

All runs are simulated: RTX PRO 6000 with Llama-3.1-8B, 64 seats a worker. In order means that no document is left out
of a step for others (schedulers/near_lengths.py).

    flow    120 short jobs in flight for 30 s, and 24 documents of 4,000 to 16,000 tokens beside them
    once    300 short jobs and 30 such documents, all at once
    chats   8 real-time chats a second for 16 s, and 24 such documents in flight

Rows: output tokens a second while requests come, and with the drain; those of documents; the 99th percentile of the
mean times between a request's tokens; chats in time; and the share of steps with decodes that ran without some.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alignedserve.core import ServiceClass
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.simulating import of_each, record_of, save_load
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.loads.figures.request_figures import attains, mean_tpot_s, requests_of_class
from alignedserve.loads.records.distribution import ratio
from alignedserve.loads.records.records import RunRecord
from alignedserve.schedulers import aligned, near_lengths
from alignedserve.schedulers.near_lengths import FOR_ANSWERS, FOR_PROMPTS
from alignedserve.worker.step.view import PlannedStep, StepView

GPU, SEATS = "rtxpro6000-llama-3.1-8b-tp1", "engine.max_batch=64"
SHORT = {"prompt": "64-256", "output": "64-256"}
DOCUMENTS = {"name": "documents", "service": "be", "prompt": "4000-16000", "output": "128-512"}
JOBS = {"name": "short", "service": "be", **SHORT}
LONG_FROM = 1_000  # tokens of a prompt
ENDLESS = 100_000
LESS, MORE, OF_DOCUMENTS, OF_P99 = 1.0, 1.08, 0.5, 1.1  # goals, as shares of the figure in order


def _in_flight(number: int) -> dict[str, Any]:
    return {"arrivals": "closed", "replace": True, "in_flight": number, "num_requests": ENDLESS}


def _at_once(number: int) -> dict[str, Any]:
    return {"arrivals": "at_once", "num_requests": number}


LOADS: dict[str, tuple[float, list[dict[str, Any]]]] = {  # name -> seconds with arrivals, streams
    "flow": (30.0, [{**JOBS, **_in_flight(120)}, {**DOCUMENTS, **_in_flight(24)}]),
    "once": (1e6, [{**JOBS, **_at_once(300)}, {**DOCUMENTS, **_at_once(30)}]),
    "chats": (
        16.0,
        [{"name": "chats", **SHORT, "rate": 8.0, "num_requests": ENDLESS}, {**DOCUMENTS, **_in_flight(24)}],
    ),
}


@dataclass(frozen=True)
class SimulatedLoad:
    load: str
    cluster: str
    seed: int
    is_in_order: bool


@dataclass(frozen=True)
class SimulatedFigures:
    tokens_per_s: float  # while requests come
    whole_per_s: float  # with the drain
    documents_per_s: float  # tokens of documents while requests come
    p99_ms: float
    attained: float  # share of chats
    left_out: float  # share of the steps with decodes

    @classmethod
    def from_record(cls, record: RunRecord, first_s: float) -> SimulatedFigures:
        until = min(record.began_at + first_s, record.ended_at)
        came = {request.id: sum(at <= until for at in request.token_at) for request in record.requests}
        long = [request for request in record.requests if request.num_prompt >= LONG_FROM]
        chats = requests_of_class(record.requests, ServiceClass.RT)
        tpots = sorted(mean_tpot_s(request) for request in record.requests if len(request.token_at) > 1)
        seconds = until - record.began_at
        return cls(
            sum(came.values()) / seconds,
            sum(len(request.token_at) for request in record.requests) / record.duration_s,
            sum(came[request.id] for request in long) / seconds,
            1000 * tpots[int(0.99 * len(tpots))],
            ratio(sum(map(attains, chats)), len(chats)) if chats else 1.0,
            0.0,
        )


class _CountingLengths(near_lengths.NearLengths):
    """Counts the steps with decodes, and those that leave some out."""

    num = num_left_out = 0

    def choose(self, found: PlannedStep, view: StepView) -> PlannedStep:
        chosen = super().choose(found, view)
        _CountingLengths.num += bool(found.shape.decodes)
        _CountingLengths.num_left_out += chosen is not found
        return chosen


def figures_of(run: SimulatedLoad) -> SimulatedFigures:
    """Simulate the run. In order, documents may be left out for no time at all."""
    near_lengths.FOR_ANSWERS = 1.0 if run.is_in_order else FOR_ANSWERS
    near_lengths.FOR_PROMPTS = 1.0 if run.is_in_order else FOR_PROMPTS
    setattr(aligned, "NearLengths", _CountingLengths)  # noqa: B010  (the module does not export it)
    _CountingLengths.num = _CountingLengths.num_left_out = 0
    first_s, streams = LOADS[run.load]
    with TemporaryDirectory() as folder:
        workload = save_load(Path(folder) / "load.yaml", first_s, *streams)
        trial = SimulationTrial("aligned", workload, run.cluster, run.seed, None, GPU, options=(SEATS,))
        figures = SimulatedFigures.from_record(record_of(trial), first_s)
    return replace(figures, left_out=ratio(_CountingLengths.num_left_out, _CountingLengths.num))


def tell(run: SimulatedLoad, ours: SimulatedFigures, in_order: SimulatedFigures) -> None:
    where = f"{run.load}, {run.cluster}, seed {run.seed}"
    pays = run.load == "flow" and "+" in run.cluster
    rows = [
        ("tokens", ours.tokens_per_s, in_order.tokens_per_s, MORE if pays else LESS),
        ("tokens with the drain", ours.whole_per_s, in_order.whole_per_s, LESS),
        ("tokens of documents", ours.documents_per_s, in_order.documents_per_s, OF_DOCUMENTS),
    ]
    for name, value, base, least in rows:
        report(f"{where}, {name}", value, "1/s", baseline=base, goal=least * base, at_least=True)
    report(f"{where}, p99 between tokens", ours.p99_ms, "ms", baseline=in_order.p99_ms, goal=OF_P99 * in_order.p99_ms)
    base = in_order.attained
    report(f"{where}, chats in time", ours.attained, "1", baseline=base, goal=base, at_least=True)
    report(f"{where}, steps without some", ours.left_out, "1")


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--loads", type=several(str, LOADS), default=list(LOADS), help="default: all")
    parser.add_argument("--clusters", type=several(str), default=["1+1", "2xcolocated"], help="default: both")
    parser.add_argument("--seeds", type=several(int), default=[0], help="default: %(default)s")
    args = parser.parse_args()
    runs = [SimulatedLoad(*row) for row in product(args.loads, args.clusters, args.seeds, (False, True))]
    figures = iter(of_each(figures_of, runs))
    for run in runs[::2]:
        tell(run, next(figures), next(figures))
    return status()


if __name__ == "__main__":
    raise SystemExit(main())
