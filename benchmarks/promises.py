"""Measure whether promises are kept: over capacity and below it, beside documents, on few and on many workers.

    python -m benchmarks.promises                                 # some minutes: one seed and few loads
    python -m benchmarks.promises --parts overload --seeds 0,1,2 --all
    python -m benchmarks.promises --chats FILE.csv                # another trace of chats

All runs are simulated: RTX 4090 with Llama-3.1-8B, two colocated workers unless a row says more.

    overload   chats per second that keep all their promises at 1.25 to 3 times the capacity, against the most that did
               at up to 1.25 times. The capacity is the highest rate at which 19 of 20 do
    refusals   requests refused at 0.7 times the capacity, where nobody needs to be
    placement  how evenly many workers hold tokens, and preemptions, at equal load for each worker
    handing_on prefill and decode workers: promises kept beside documents at half of their capacity, and against as many
               colocated workers where prompts are long and outputs short
    documents  mean completion of documents that come all at once, against the shortest-first preset, and with lengths
               known against not known
    beside     documents, all at once and one after the other, beside each kind of chats: chats in time against the
               best preset, and tokens of documents against the best preset that keeps as many promises; and the longest
               time that a document stands still at 0.7 times the capacity
    predictions  mean completion of documents at once whose words tell their lengths, against no predictions, with
               lengths that are known, learnt, learnt of something else, or learnt the wrong way round
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from alignedserve.core import ServiceClass
from alignedserve.simulator.records.records import RunRecord
from alignedserve.simulator.reports.figures import RunFigures
from alignedserve.simulator.reports.request_figures import attains, requests_of_class, ttft_s
from alignedserve.simulator.reports.trial import SimulationTrial
from alignedserve.simulator.workload.spec import read_workload
from benchmarks.common.lessons import Lesson, arrivals, played, settings_of_cluster
from benchmarks.common.simulating import record_of, save_load
from benchmarks.report import command, report, several, status

CHATS = Path(__file__).parent / "data" / "azure_conv.csv"
GPU = "rtx4090-llama-3.1-8b-tp1"
KEPT, AT_HALF = 0.95, 0.99
NO_WORSE = 1.02  # than without predictions
MULTIPLES, FEW = (1.25, 1.5, 2.0, 3.0), (1.25, 3.0)
BELOW, HALF = 0.7, 0.5
ONE_PLUS_ONE = 0.6  # of the capacity of two colocated workers, at least: a prefill and a decode worker
AGAINST = {"1+1": "2xcolocated", "1+2": "3xcolocated", "2+2": "4xcolocated"}
OTHERS = ("aligned-no-batch", "bros", "bros-plain")  # presets that attain about as much as the default
ALL_OTHERS = (*OTHERS, "alise", "accelgen", "apt-serve-kv", "vllm-chunked", "sarathi")
POINTS, OF_BEST = 0.005, 0.98
DOCUMENTS = {"service": "be", "prompt": "lognormal:800:900:6000", "output": "exp:150:1000"}
AT_ONCE, A_SECOND = 300, 4.0  # documents
LONGEST_S = 20.0  # twice schedule.age_s
LOTS = {  # of documents: a lot comes when the one before it has ended
    "name": "documents",
    "service": "be",
    "prompt": "512-1024",
    "output": "32-128",
    "arrivals": "closed",
    "in_flight": 32,
    "num_requests": 100_000,
}


@dataclass(frozen=True)
class Load:
    """Requests of one kind; `capacity` is what two workers take, in chats per second."""

    workload: str
    capacity: float
    seconds: int = 60

    def trial(self, rate: float, seed: int, cluster: str = "2xcolocated") -> SimulationTrial:
        return SimulationTrial("aligned", f"{self.workload},first_s={self.seconds}", cluster, seed, rate, GPU)

    def beside_documents(self, folder: Path) -> str:
        """Write the same requests with documents beside them, and return the name of the file."""
        endless = {} if self.workload.startswith("trace:") else {"rate": 1.0, "num_requests": 100_000}
        return save_load(folder / "load.yaml", self.seconds, {**endless, **self.stream()}, LOTS)

    def stream(self) -> dict[str, object]:
        """Return the chats as a stream of a workload's file."""
        kind, _, keys = self.workload.partition(":")
        own = {"path": keys} if kind == "trace" else dict(pair.split("=") for pair in keys.split(","))
        return {"name": "chats", "kind": kind, **own}


def loads(chats: Path) -> dict[str, Load]:
    return {
        "chats": Load(f"trace:{chats.resolve()}", 8.0),
        "long prompts": Load("sizes:prompt=lognormal:2048:1900:8000,output=lognormal:28:60:400", 5.0),
        "short chats": Load("sizes:prompt=exp:80:400,output=exp:60:300", 120.0, 20),
        "conversations": Load(
            "sizes:prompt=lognormal:150:200:1500,output=lognormal:150:150:800,turns=2-8,system=200,think_s=exp:5:30",
            4.0,
        ),
    }


def goodput(record: RunRecord, seconds: int) -> float:
    """Return the chats per second of arrivals that kept all promises."""
    return sum(map(attains, requests_of_class(record.requests, ServiceClass.RT))) / seconds


def overload(chosen: dict[str, Load], seeds: Sequence[int], with_all: bool) -> None:
    for name, load in chosen.items():

        def kept(multiple: float, load: Load = load) -> float:
            trials = [load.trial(load.capacity * multiple, seed) for seed in seeds]
            return mean(goodput(record_of(trial), load.seconds) for trial in trials)

        peak = max(kept(multiple) for multiple in ((0.75, 1.0, 1.25) if with_all else (1.0,)))
        for multiple in MULTIPLES if with_all else FEW:
            label = f"{name}, chats that keep their promises at {multiple:g} times the capacity"
            value = kept(multiple)
            report(label, value, "1/s", baseline=peak, goal=KEPT * peak, at_least=True)


def refusals(chosen: dict[str, Load], seeds: Sequence[int], with_all: bool) -> None:
    for name, load in chosen.items():
        for cluster in ("2xcolocated", "1+1") if with_all else ("2xcolocated",):
            rate = BELOW * load.capacity * (1.0 if cluster == "2xcolocated" else ONE_PLUS_ONE)
            runs = [RunFigures.from_record(record_of(load.trial(rate, seed, cluster))) for seed in seeds]
            report(
                f"{name}, {cluster}, refused at {rate:.3g}/s", sum(run.requests.refused for run in runs), "1", goal=0
            )
            report(f"{name}, {cluster}, attained at {rate:.3g}/s", mean(run.rt.attainment for run in runs), "1")


def handing_on(chosen: dict[str, Load], seeds: Sequence[int], with_all: bool) -> None:
    for name, load in chosen.items() if with_all else [("chats", chosen["chats"])]:
        rate = HALF * ONE_PLUS_ONE * load.capacity
        with TemporaryDirectory() as folder:
            trial = replace(load.trial(rate, 0, "1+1"), workload=load.beside_documents(Path(folder)))
            runs = [RunFigures.from_record(record_of(replace(trial, seed=seed))) for seed in seeds]
        where = f"{name}, 1+1 beside documents"
        report(f"{where}, refused at {rate:.3g}/s", sum(run.requests.refused for run in runs), "1", goal=0)
        attained = mean(run.rt.attainment for run in runs)
        report(f"{where}, attained at {rate:.3g}/s", attained, "1", goal=AT_HALF, at_least=True)
    long = chosen["long prompts"]
    for cluster, colocated in AGAINST.items() if with_all else [("1+1", "2xcolocated")]:
        for multiple in (0.7, 1.0, 1.5) if with_all else (1.0,):
            rate = multiple * long.capacity / 2 * int(colocated[0])
            kept, best = (
                mean(goodput(record_of(long.trial(rate, seed, workers)), long.seconds) for seed in seeds)
                for workers in (cluster, colocated)
            )
            label = f"long prompts, {cluster}, chats that keep their promises at {rate:.4g}/s, against {colocated}"
            report(label, kept, "1/s", baseline=best, goal=KEPT * best, at_least=True)


def placement(chosen: dict[str, Load], seeds: Sequence[int], with_all: bool) -> None:
    load = replace(chosen["chats"], seconds=20)
    first = 0.0
    for workers in (2, 8, 64, 256) if with_all else (2, 16):
        rate = load.capacity / 2 * 0.9 * workers
        records = [record_of(load.trial(rate, seed, f"{workers}xcolocated")) for seed in seeds]
        spread = mean(_spread(record) for record in records)
        preempted = mean(
            sum(request.num_preempted for request in record.requests) / len(record.requests) for record in records
        )
        first = first or max(preempted, 1 / 100)
        report(f"{workers} workers, tokens that steps hold, p95/p50", spread, "1", goal=1.3)
        report(f"{workers} workers, preemptions per request", preempted, "1", baseline=first, goal=2 * first)


def _spread(record: RunRecord) -> float:
    """Return how much more tokens the fullest workers hold in their decode steps than the usual worker, on average."""
    held: dict[str, list[int]] = {}
    for step in record.steps:
        if step.shape.decodes:
            held.setdefault(step.worker, []).append(step.shape.prefixes)
    means = sorted(mean(tokens) for tokens in held.values())
    return means[-(-len(means) * 95 // 100) - 1] / means[-(-len(means) // 2) - 1]


def documents(_: dict[str, Load], seeds: Sequence[int], with_all: bool) -> None:
    sizes = "service=be,prompt=lognormal:800:900:6000,output=exp:150:1000,arrivals=at_once"
    workload = f"sizes:{sizes},num_requests={600 if with_all else 300}"

    def completion_s(preset: str, predictor: str) -> float:
        options = (f"schedule.predictor={predictor}",)
        trials = [SimulationTrial(preset, workload, "2xcolocated", seed, None, GPU, options=options) for seed in seeds]
        return mean(RunFigures.from_record(record_of(trial)).be.jct_s.mean for trial in trials)

    known, unknown = completion_s("aligned", "oracle"), completion_s("aligned", "constant")
    shortest = completion_s("alise", "oracle")
    report("documents at once, lengths known, mean completion", known, "s", baseline=shortest, goal=1.05 * shortest)
    report("documents at once, lengths known against unknown", known, "s", baseline=unknown, goal=unknown)


def beside(chosen: dict[str, Load], seeds: Sequence[int], with_all: bool) -> None:
    mixes = list(product(chosen, (True, False)))
    for name, at_once in mixes if with_all else [("chats", True), ("long prompts", False)]:
        mix = Mix(name, replace(chosen[name], seconds=20 if name == "short chats" else 40), at_once)
        for share in (0.5, 0.85) if with_all else (0.85,):
            _compare(mix, share, seeds, ALL_OTHERS if with_all else OTHERS)
        _tell_longest(mix, seeds)


@dataclass(frozen=True)
class Mix:
    """Chats and documents."""

    name: str
    load: Load
    at_once: bool

    def label(self, share: float) -> str:
        how = "at once" if self.at_once else "one by one"
        return f"{self.name} at {share * self.load.capacity:.3g}/s, documents {how}"

    def records(self, preset: str, share: float, seeds: Sequence[int]) -> list[RunRecord]:
        """Run the preset with chats at this share of their capacity."""
        chats = {"first_s": self.load.seconds, **self.load.stream()}
        rate, own_rate = share * self.load.capacity, read_workload(self.load.workload).rate
        if self.at_once:
            documents = {"arrivals": "at_once", "num_requests": AT_ONCE}
        else:  # the rate of all is set: that of each changes with it
            documents = {"rate": A_SECOND * own_rate / rate, "first_s": self.load.seconds}
            rate += A_SECOND
        with TemporaryDirectory() as folder:
            path = save_load(Path(folder) / "mix.yaml", 1e6, chats, {"name": "documents", **DOCUMENTS, **documents})
            trials = [SimulationTrial(preset, path, "2xcolocated", seed, rate, GPU) for seed in seeds]
            return [record_of(trial) for trial in trials]


def _compare(mix: Mix, share: float, seeds: Sequence[int], others: Sequence[str]) -> None:
    """Report the chats in time and the tokens of documents of the default, against the best of the other presets."""
    found: dict[str, tuple[float, float]] = {}
    for preset in ("aligned", *others):
        runs = [RunFigures.from_record(record) for record in mix.records(preset, share, seeds)]
        found[preset] = mean(run.rt.attainment for run in runs), mean(run.be.tokens_per_s for run in runs)
    attained, tokens = found["aligned"]
    best = max(attained for attained, _ in found.values())
    report(f"{mix.label(share)}, attained", attained, "1", baseline=best, goal=best - POINTS, at_least=True)
    most = max(tokens for as_much, tokens in found.values() if as_much >= attained - POINTS)
    report(f"{mix.label(share)}, tokens of documents", tokens, "1/s", baseline=most, goal=OF_BEST * most, at_least=True)


def _tell_longest(mix: Mix, seeds: Sequence[int]) -> None:
    """Report how long a document waits for its first token at most, and pauses between two tokens."""
    records = mix.records("aligned", BELOW, seeds)
    begun = [request for record in records for request in requests_of_class(record.requests, ServiceClass.BE)]
    begun = [request for request in begun if request.token_at]
    pause_s = max(after - before for request in begun for before, after in pairwise(request.token_at))
    report(f"{mix.label(BELOW)}, longest pause of a document", pause_s, "s", goal=LONGEST_S)
    goal = None if mix.at_once else LONGEST_S  # all at once, the last begin when the first have made room
    report(f"{mix.label(BELOW)}, longest wait of a document", max(map(ttft_s, begun)), "s", goal=goal)


def predictions(_: dict[str, Load], seeds: Sequence[int], with_all: bool) -> None:
    number = 600 if with_all else 300

    def completion_s(lesson: Lesson, cluster: str) -> float:
        def played_once(seed: int) -> float:
            asked = list(arrivals(number, ServiceClass.BE, seed))
            record = played(settings_of_cluster(cluster, seed=seed), lesson, asked)
            return RunFigures.from_record(record).be.jct_s.mean

        return mean(map(played_once, seeds))

    for cluster in ("2xcolocated", "1+1") if with_all else ("2xcolocated",):
        without = completion_s(Lesson.NOTHING, cluster)
        for lesson in (Lesson.PERFECT, Lesson.LEARNT, Lesson.USELESS, Lesson.REVERSED):
            label = f"documents at once, {cluster}, predictions {lesson.value}, mean completion"
            report(label, completion_s(lesson, cluster), "s", baseline=without, goal=NO_WORSE * without)


PARTS: dict[str, Callable[[dict[str, Load], Sequence[int], bool], None]] = {
    "overload": overload,
    "refusals": refusals,
    "handing_on": handing_on,
    "placement": placement,
    "documents": documents,
    "beside": beside,
    "predictions": predictions,
}


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--parts", type=several(str, PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--seeds", type=several(int), default=[0], help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="all loads, rates and sizes: two hours for three seeds")
    parser.add_argument(
        "--chats", type=Path, default=CHATS, help="a CSV file with arrival_s, prompt_tokens, output_tokens"
    )
    args = parser.parse_args()
    chosen = loads(args.chats)
    for part in args.parts:
        PARTS[part](chosen, args.seeds, args.all)
    return status()


if __name__ == "__main__":
    raise SystemExit(main())
