"""Measure whether promises are kept: over capacity and below it, beside documents, on few and on many workers.

    python -m lab.benchmarks.promises                                 # about a minute on two cores: one seed, few rates
    python -m lab.benchmarks.promises --parts overload --seeds 0,1,2 --all
    python -m lab.benchmarks.promises --chats FILE.csv                # another trace of chats
    python -m lab.benchmarks.promises --parts lending --seeds 0,1,2
    python -m lab.benchmarks.promises --parts near_lengths --seeds 0,1,2

All runs are simulated: RTX 4090 with Llama-3.1-8B, two colocated workers unless a row says more.

    overload   chats per second that keep all their promises at 1.25 to 3 times the capacity, against the most that did
               at up to 1.25 times. The capacity is the highest rate at which 19 of 20 do
    refusals   requests refused at 0.7 times the capacity, where nobody needs to be
    lending    a prefill worker that decodes, and a decode worker, against two colocated ones, for each seed: promises
               kept and the gaps between tokens; and tokens of documents that come at once, on 3+1 against 4xcolocated
    answers    chats with answers of 1,600 tokens at up to 3.5 times the capacity, 2xcolocated and as 1+1: those
               that keep all promises, against the most at up to the capacity, and against the best preset
    beside     documents, all at once and one after the other, beside each kind of chats: chats in time against the
               best preset, and tokens of documents against the best preset that keeps as many promises; and the longest
               time that a document stands still at 0.7 times the capacity
    near_lengths   that decodes of near lengths share a step (schedulers/near_lengths.py), against the same runs in
               order, for each load (NEAR), topology and seed: tokens while requests come, and with the drain; tokens of
               long documents; the 99th percentile of the requests' mean time between tokens; chats in time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypeVar
from unittest.mock import patch

from alignedserve.core import ServiceClass
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.simulating import figure_of_each, of_each, record_of, save_load
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.loads.figures.request_figures import attains, mean_tpot_s, requests_of_class, ttft_s
from alignedserve.loads.records.records import RunRecord
from alignedserve.loads.workload.spec import read_workload
from alignedserve.schedulers.near_lengths import NearLengths

T = TypeVar("T")

CHATS = Path(__file__).parent / "data" / "azure_conv.csv"
ANSWERS = CHATS.with_name("bwb_answers.csv")
GPU = "rtx4090-llama-3.1-8b-tp1"
KEPT = 0.95
MULTIPLES, FEW = (1.25, 1.5, 2.0, 3.0), (3.0,)
BELOW = 0.7
ONE_PLUS_ONE = 0.6  # of the capacity of two colocated workers, at least: a prefill and a decode worker
OTHERS = ("aligned-multi-resource", "bros", "bros-plain")  # presets that attain about as much as the default
ALL_OTHERS = (*OTHERS, "alise", "accelgen", "apt-serve-kv", "vllm-chunked", "sarathi")
# Of chats with long answers: chats per second that workers have memory for, and the presets that keep most of them.
ANSWERED = {"2xcolocated": (1.5, ("sarathi", "bros")), "1+1": (0.75, ("distserve",))}
ANSWERS_S = 45
POINTS, OF_BEST = 0.005, 0.98
DOCUMENTS = {"service": "be", "prompt": "lognormal:800:900:6000", "output": "exp:150:1000"}
AT_ONCE, A_SECOND = 300, 4.0  # documents
LONGEST_S = 20.0
LOTS = {  # of documents: a lot comes when the lot before has ended
    "name": "documents",
    "service": "be",
    "prompt": "512-1024",
    "output": "32-128",
    "arrivals": "closed",
    "in_flight": 32,
    "num_requests": 100_000,
}


@dataclass(frozen=True)
class NamedLoad:
    """Requests of one kind; `capacity` is what two workers take, in chats per second."""

    workload: str
    capacity: float
    seconds: int = 60

    def trial(self, rate: float, cluster: str = "2xcolocated") -> SimulationTrial:
        return SimulationTrial("aligned", f"{self.workload},first_s={self.seconds}", cluster, 0, rate, GPU)

    def beside_documents(self, path: Path, documents: Mapping[str, object] = MappingProxyType(LOTS)) -> str:
        """Write the same requests with documents beside, and return the name of the file."""
        endless = {} if self.workload.startswith("trace:") else {"rate": 1.0, "num_requests": 100_000}
        return save_load(path, self.seconds, {**endless, **self.stream()}, {**documents})

    def stream(self) -> dict[str, object]:
        """Return the chats as a stream of a workload's file."""
        kind, _, keys = self.workload.partition(":")
        own = {"path": keys} if kind in ("trace", "lengths") else dict(pair.split("=") for pair in keys.split(","))
        return {"name": "chats", "kind": kind, **own}


def loads(chats: Path) -> dict[str, NamedLoad]:
    return {
        "chats": NamedLoad(f"trace:{chats.resolve()}", 8.0),
        "long prompts": NamedLoad("sizes:prompt=lognormal:2048:1900:8000,output=lognormal:28:60:400", 5.0),
        "short chats": NamedLoad("sizes:prompt=exp:80:400,output=exp:60:300", 120.0, 20),
        "conversations": NamedLoad(
            "sizes:prompt=lognormal:150:200:1500,output=lognormal:150:150:800,turns=2-8,system=200,think_s=exp:5:30",
            4.0,
        ),
    }


LENT = {  # loads near what two workers take, with rates in chats per second
    "chats as ShareGPT's": ("chat", 14.0),
    "conversations": ("conversations,num_requests=100000", 2.5),
    "long prompts": ("sizes:prompt=lognormal:2047:1900:7000,output=lognormal:28:50:400", 5.0),
    "long answers": ("sizes:prompt=lognormal:1067:300:2048,output=lognormal:1613:450:3000", 1.3),
    "summaries": ("sizes:prompt=lognormal:2753:1500:8000,output=lognormal:170:100:600", 3.0),
}
# Clusters that are compared, with their rates in times of those above; with --all all of them.
LENT_ON = ((("1+1", "2xcolocated"), 1.0), (("1+1", "2xcolocated"), 1.5), (("2+2", "4xcolocated"), 2.0))
LENT_S, OF_COLOCATED, OF_BATCH = 30, 1.0, 0.95
BATCH_GPU = "rtxpro6000-llama-3.1-8b-tp1"
BATCH = (  # one-time, of two kinds
    {"name": "short", "service": "be", "prompt": "64-256", "output": "64-256"},
    {"name": "long", "service": "be", "prompt": "8000-30000", "output": "256-1024"},
)
NUM_SHORT, NUM_LONG = 700, 70


def _in_flight(number: int) -> dict[str, Any]:
    return {"arrivals": "closed", "replace": True, "in_flight": number, "num_requests": 100_000}


FEW_TOKENS, FEW_SEATS = {"prompt": "64-256", "output": "64-256"}, "engine.max_batch=64"
LONG_DOCUMENTS = {"name": "documents", "service": "be", "prompt": "4000-16000", "output": "128-512"}
SHORT_JOBS = {"name": "short", "service": "be", **FEW_TOKENS}
LONG_FROM = 1_000  # tokens of a prompt
NEAR: dict[str, tuple[float, tuple[dict[str, Any], ...]]] = {  # seconds with arrivals, and streams, on BATCH_GPU
    "flow": (30.0, ({**SHORT_JOBS, **_in_flight(120)}, {**LONG_DOCUMENTS, **_in_flight(24)})),
    "once": (
        1e6,
        tuple(
            {**each, "arrivals": "at_once", "num_requests": number}
            for each, number in ((SHORT_JOBS, 300), (LONG_DOCUMENTS, 30))
        ),
    ),
    "chats": (
        16.0,
        ({"name": "chats", **FEW_TOKENS, "rate": 8.0, "num_requests": 100_000}, {**LONG_DOCUMENTS, **_in_flight(24)}),
    ),
}
OF_FLOW, OF_LONG, OF_P99 = 1.08, 0.5, 1.1  # goals, as shares of the figure in order


def of_seeds(
    figure: Callable[[RunRecord], T], trials: Sequence[SimulationTrial], seeds: Sequence[int]
) -> list[tuple[T, ...]]:
    """Run each trial with each seed, and return the figures of each trial's records."""
    figures = iter(figure_of_each(figure, [replace(trial, seed=seed) for trial in trials for seed in seeds]))
    return [tuple(islice(figures, len(seeds))) for _ in trials]


def num_kept(record: RunRecord) -> int:
    """Return the chats that kept all promises."""
    return sum(map(attains, requests_of_class(record.requests, ServiceClass.RT)))


def overload(chosen: dict[str, NamedLoad], seeds: Sequence[int], with_all: bool) -> None:
    below, above = ((0.75, 1.0, 1.25), MULTIPLES) if with_all else ((1.0,), FEW)
    rows = list(product(chosen, sorted({*below, *above})))
    trials = [chosen[name].trial(chosen[name].capacity * multiple) for name, multiple in rows]
    runs = dict(zip(rows, of_seeds(num_kept, trials, seeds), strict=True))
    for name, load in chosen.items():
        peak = max(mean(runs[name, multiple]) for multiple in below) / load.seconds
        for multiple in above:
            label = f"{name}, chats that keep their promises at {multiple:g} times the capacity"
            value = mean(runs[name, multiple]) / load.seconds
            report(label, value, "1/s", baseline=peak, goal=KEPT * peak, at_least=True)


def refusals(chosen: dict[str, NamedLoad], seeds: Sequence[int], with_all: bool) -> None:
    rows = [
        (name, load.trial(BELOW * load.capacity * (1.0 if cluster == "2xcolocated" else ONE_PLUS_ONE), cluster))
        for name, load in chosen.items()
        for cluster in (("2xcolocated", "1+1") if with_all else ("2xcolocated",))
    ]
    every = of_seeds(RunFigures.from_record, [trial for _, trial in rows], seeds)
    for (name, trial), runs in zip(rows, every, strict=True):
        where, at = f"{name}, {trial.cluster}", f"at {trial.rate:.3g}/s"
        report(f"{where}, refused {at}", sum(run.requests.refused for run in runs), "1", goal=0)
        report(f"{where}, attained {at}", mean(run.rt.attainment for run in runs), "1")


def lending(chosen: dict[str, NamedLoad], seeds: Sequence[int], with_all: bool) -> None:
    """Report each seed apart: a mean would hide one in which prefill workers lose."""
    chats = chosen["chats"]
    rows = {"chats": (chats.workload, 0.8 * chats.capacity), **LENT}
    for (name, (workload, usual)), (clusters, times) in product(rows.items(), LENT_ON if with_all else LENT_ON[:1]):
        load, rate = f"{workload},first_s={LENT_S}", times * usual
        trials = [SimulationTrial("aligned", load, cluster, 0, rate, GPU) for cluster in clusters]
        for seed, (kept, gap_s), (best, other_s) in zip(seeds, *of_seeds(kept_and_gap, trials, seeds), strict=True):
            where = f"{name} at {rate:g}/s, {' against '.join(clusters)}, seed {seed}"
            goal = OF_COLOCATED * best
            report(f"{where}, chats that keep their promises", kept, "1", baseline=best, goal=goal, at_least=True)
            report(f"{where}, P99 of gaps", gap_s, "s", baseline=other_s, goal=other_s)
    with TemporaryDirectory() as folder:
        counts = zip(BATCH, (NUM_SHORT, NUM_LONG), strict=True)
        streams = [{**stream, "arrivals": "at_once", "num_requests": number} for stream, number in counts]
        batch = save_load(Path(folder) / "batch.yaml", 1e6, *streams)
        trials = [SimulationTrial("aligned", batch, cluster, 0, None, BATCH_GPU) for cluster in ("3+1", "4xcolocated")]
        lent_rates, rates = of_seeds(be_tokens_per_s, trials, seeds)
    for seed, value, best in zip(seeds, lent_rates, rates, strict=True):
        where = f"documents at once, 3+1 against 4xcolocated, seed {seed}"
        report(f"{where}, tokens", value, "1/s", baseline=best, goal=OF_BATCH * best, at_least=True)


def kept_and_gap(record: RunRecord) -> tuple[int, float]:
    """Return the chats that kept all promises, and the 99th percentile of gaps between tokens."""
    return num_kept(record), RunFigures.from_record(record).rt.tbt_s.p99


def be_tokens_per_s(record: RunRecord) -> float:
    return RunFigures.from_record(record).at("be.tokens_per_s")


def answers(_: dict[str, NamedLoad], seeds: Sequence[int], with_all: bool) -> None:
    workload = f"lengths:{ANSWERS.resolve()},first_s={ANSWERS_S}"
    multiples = (0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 3.5) if with_all else (1.0, 1.5)
    for cluster, (capacity, others) in ANSWERED.items():
        rows = list(product(("aligned", *others), multiples))
        trials = [SimulationTrial(preset, workload, cluster, 0, multiple * capacity, GPU) for preset, multiple in rows]
        kept = dict(zip(rows, (mean(run) / ANSWERS_S for run in of_seeds(num_kept, trials, seeds)), strict=True))
        peak = max(kept["aligned", multiple] for multiple in multiples if multiple <= 1)
        for multiple in multiples:
            label = f"long answers, {cluster}, chats that keep their promises at {multiple:g} times the capacity"
            value, best = kept["aligned", multiple], max(kept[preset, multiple] for preset in others)
            if multiple > 1:
                report(label, value, "1/s", baseline=peak, goal=KEPT * peak, at_least=True)
            report(f"{label}, against the best preset", value, "1/s", baseline=best, goal=best, at_least=True)


def beside(chosen: dict[str, NamedLoad], seeds: Sequence[int], with_all: bool) -> None:
    """Run each preset with chats at shares of the capacity."""
    mixes = list(product(chosen, (True, False)))
    few = [mix for mix in mixes if mix in (("chats", True), ("long prompts", False))]
    for name, at_once in mixes if with_all else few:
        load = replace(chosen[name], seconds=20 if name == "short chats" else 40)
        shares = (0.5, 0.85) if with_all else (0.85,)
        presets = ("aligned", *(ALL_OTHERS if with_all else OTHERS))
        rows = [*product(presets, shares), ("aligned", BELOW)]
        with TemporaryDirectory() as folder:
            trials = [_mixed(load, at_once, Path(folder) / f"{row[1]}.yaml", *row) for row in rows]
            runs = dict(zip(rows, of_seeds(Beside.from_record, trials, seeds), strict=True))
        how = "at once" if at_once else "one by one"
        for share in (*shares, BELOW):
            label = f"{name} at {share * load.capacity:.3g}/s, documents {how}"
            if share == BELOW:
                _tell_longest(label, at_once, runs["aligned", share])
            else:
                _compare(label, {preset: runs[preset, share] for preset in presets})


def _mixed(load: NamedLoad, at_once: bool, path: Path, preset: str, share: float) -> SimulationTrial:
    """Return a trial of chats at a share of the capacity, and documents."""
    chats = {"first_s": load.seconds, **load.stream()}
    rate, own_rate = share * load.capacity, read_workload(load.workload).rate
    if at_once:
        documents = {"arrivals": "at_once", "num_requests": AT_ONCE}
    else:  # the rate of all is set: that of each changes with it
        documents = {"rate": A_SECOND * own_rate / rate, "first_s": load.seconds}
        rate += A_SECOND
    workload = save_load(path, 1e6, chats, {"name": "documents", **DOCUMENTS, **documents})
    return SimulationTrial(preset, workload, "2xcolocated", 0, rate, GPU)


@dataclass(frozen=True)
class Beside:
    """Figures of a run of chats and documents."""

    attained: float
    tokens_per_s: float  # of documents
    longest_pause_s: float  # of a document, between two tokens
    longest_wait_s: float  # of a document, for the first token

    @classmethod
    def from_record(cls, record: RunRecord) -> Beside:
        figures = RunFigures.from_record(record)
        begun = [request for request in requests_of_class(record.requests, ServiceClass.BE) if request.token_at]
        pauses = (after - before for request in begun for before, after in pairwise(request.token_at))
        waits = map(ttft_s, begun)
        return cls(figures.rt.attainment, figures.be.tokens_per_s, max(pauses, default=0.0), max(waits, default=0.0))


def _compare(label: str, runs: dict[str, tuple[Beside, ...]]) -> None:
    """Report the chats in time and the tokens of documents of the default, against the best of the other presets."""
    found = {
        preset: (mean(run.attained for run in each), mean(run.tokens_per_s for run in each))
        for preset, each in runs.items()
    }
    attained, tokens = found["aligned"]
    best = max(attained for attained, _ in found.values())
    report(f"{label}, attained", attained, "1", baseline=best, goal=best - POINTS, at_least=True)
    most = max(tokens for as_much, tokens in found.values() if as_much >= attained - POINTS)
    report(f"{label}, tokens of documents", tokens, "1/s", baseline=most, goal=OF_BEST * most, at_least=True)


def _tell_longest(label: str, at_once: bool, runs: Sequence[Beside]) -> None:
    """Report how long a document waits for the first token at most, and pauses between two tokens."""
    report(f"{label}, longest pause of a document", max(run.longest_pause_s for run in runs), "s", goal=LONGEST_S)
    goal = None if at_once else LONGEST_S  # all at once, the last begin when the first have made room
    report(f"{label}, longest wait of a document", max(run.longest_wait_s for run in runs), "s", goal=goal)


@dataclass(frozen=True)
class NearFigures:
    tokens_per_s: float  # while requests come
    drained_per_s: float  # tokens of all, with the drain
    long_per_s: float  # tokens of long documents while requests come
    p99_s: float
    attained: float  # share of chats

    @classmethod
    def of(cls, run: tuple[str, SimulationTrial, bool]) -> NearFigures:
        """Simulate a load with steps in order or not, in a process of its own."""
        load, trial, in_order = run
        with patch.object(NearLengths, "choose", lambda _self, found, _view: found) if in_order else nullcontext():
            record = record_of(trial)
        until = min(record.began_at + NEAR[load][0], record.ended_at)
        came = [(request, sum(at <= until for at in request.token_at)) for request in record.requests]
        long = sum(tokens for request, tokens in came if request.num_prompt >= LONG_FROM)
        chats = requests_of_class(record.requests, ServiceClass.RT)
        tpots = sorted(mean_tpot_s(request) for request in record.requests if len(request.token_at) > 1)
        seconds = until - record.began_at
        return cls(
            sum(tokens for _, tokens in came) / seconds,
            sum(len(request.token_at) for request in record.requests) / record.duration_s,
            long / seconds,
            tpots[int(0.99 * len(tpots))],
            num_kept(record) / len(chats) if chats else 1.0,
        )


def near_lengths(_: dict[str, NamedLoad], seeds: Sequence[int], _with_all: bool) -> None:
    """Report each seed apart: a mean would hide one in which documents lose more than others gain."""
    rows = list(product(NEAR, ("1+1", "2xcolocated"), seeds))
    with TemporaryDirectory() as folder:
        saved = {
            name: save_load(Path(folder) / f"{name}.yaml", first_s, *streams)
            for name, (first_s, streams) in NEAR.items()
        }
        trials = [
            SimulationTrial("aligned", saved[name], cluster, seed, None, BATCH_GPU, options=(FEW_SEATS,))
            for name, cluster, seed in rows
        ]
        runs = [
            (row[0], trial, in_order) for row, trial in zip(rows, trials, strict=True) for in_order in (False, True)
        ]
        figures = iter(of_each(NearFigures.of, runs))
    for load, cluster, seed in rows:
        near, in_order = next(figures), next(figures)
        where, least = f"{load}, {cluster}, seed {seed}", OF_FLOW if load == "flow" else 1.0
        for name, value, base, goal in (
            ("tokens", near.tokens_per_s, in_order.tokens_per_s, least),
            ("tokens with the drain", near.drained_per_s, in_order.drained_per_s, 1.0),
            ("tokens of documents", near.long_per_s, in_order.long_per_s, OF_LONG),
        ):
            report(f"{where}, {name}", value, "1/s", baseline=base, goal=goal * base, at_least=True)
        base = in_order.p99_s
        report(f"{where}, P99 of mean times between tokens", near.p99_s, "s", baseline=base, goal=OF_P99 * base)
        base = in_order.attained
        report(f"{where}, chats in time", near.attained, "1", baseline=base, goal=base, at_least=True)


PARTS: dict[str, Callable[[dict[str, NamedLoad], Sequence[int], bool], None]] = {
    "overload": overload,
    "refusals": refusals,
    "lending": lending,
    "answers": answers,
    "beside": beside,
    "near_lengths": near_lengths,
}


def main() -> int:
    parser = command(__doc__)
    usual = [part for part in PARTS if part not in ("lending", "near_lengths")]
    what = "default: all but lending and near_lengths"
    parser.add_argument("--parts", type=several(str, PARTS), default=usual, help=what)
    parser.add_argument("--seeds", type=several(int), default=[0], help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="all loads, rates, sizes: forty minutes of two cores")
    parser.add_argument(
        "--chats", type=Path, default=CHATS, help="a trace with arrival_s, prompt_tokens, output_tokens"
    )
    args = parser.parse_args()
    for part in args.parts:
        PARTS[part](loads(args.chats), args.seeds, args.all)
    return status()


if __name__ == "__main__":
    raise SystemExit(main())
