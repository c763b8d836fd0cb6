"""Measure chats beside saturating best-effort documents, on a colocated deployment of a random 160 M Llama.

    python -m lab.benchmarks.isolation [--seconds 30] [--rate 2] [--be 32] [--promises own,tight,default]
                                       [--model FOLDER] [-- SERVE FLAGS]
    python -m lab.benchmarks.isolation [--presets aligned,bros,sarathi] [--peer-python PATH [--budgets 64,128,256,512]]
    python -m lab.benchmarks.isolation --url http://127.0.0.1:8000 [--priority 1]
    python -m lab.benchmarks.isolation --backend simulated [--seconds 40] [--machine zen4] [--off 0.04,0.12] [--hog]

One workload is played on a deployment by the client of `alignedserve bench`, or simulated. Chats come at random times
(prompts of 32-256 tokens, 16-96 out). Documents are always there, as many as `--be` says (512-1,024 in, 32-128 out).
First chats and documents run alone, then together, with three promises to the chats. The tight promise is also measured
without documents: they do not cause every miss there.

    own        TTFT: 1.10 times the p95 of chats alone, and a median step more; TBT: 1.20 times the p95 of chats alone
    tight      0.3 s and 60 ms
    default    1 s and 187.5 ms

`--seconds` is the length of each run; simulated runs of several seeds count as one. BE tokens count over a
whole run, as other servers' clients count them; while chats come, they count from the end of the run's first third: by
then the first documents have their prompts behind them. With `--hog` another tenant takes half of the memory bandwidth
(HoggedTruth). `alignedserve bench --batch` has documents as lines of a batch.

Each of `--presets` runs on a deployment of its own, one after the other, simulated ones too. With `--peer-python`, a
Python that has vLLM's CPU build, vLLM's server is measured after ours, on the same model, with documents behind chats
(`priority`), and once for each budget of tokens in a step. `--url` asks any server with OpenAI's
API, whose model is named `measured`, instead of starting ours.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

import numpy as np

from alignedserve.core import Request, ServiceClass, StepPlan
from alignedserve.cost import profile as cost_profile
from alignedserve.cost.model import CostModel, Uncertainty
from alignedserve.lab.bench.wording import IdWording
from alignedserve.lab.benchmarks.common.machines import GATEWAY_MS, MACHINES, save_profile
from alignedserve.lab.benchmarks.common.models import llama160m
from alignedserve.lab.benchmarks.common.peers import behind_chats, serve_vllm
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.serving import ask, beside, played, serve
from alignedserve.lab.benchmarks.common.simulating import record_of, recorded, save_load
from alignedserve.lab.devices.hardware import ProfileTruth
from alignedserve.lab.loads.figures.request_figures import attains_p99, finished, gaps_s, requests_of_class, ttft_s
from alignedserve.lab.loads.records.distribution import percentile
from alignedserve.lab.loads.records.records import RequestRecord, RunRecord
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.machines.world import World
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.trials.building import device_of, settings_of

COUNTED_FROM = 1 / 3  # of a run
CHAT = {"name": "chat", "prompt": "32-256", "output": "16-96", "max_tokens": 96}
DOCUMENT = {"name": "documents", "service": "be", "prompt": "512-1024", "output": "32-128", "max_tokens": 128}
IN_FLIGHT = {"arrivals": "closed", "replace": True, "jct_s": 600}

Play = Callable[[str], list[RunRecord]]  # the file of a workload -> a run for each seed


@dataclass(frozen=True)
class MeasuredServer:
    """What a load is played on."""

    name: str
    playing: AbstractContextManager[Play]
    has_goals: bool = False  # goals for tokens in a second


@dataclass(frozen=True)
class ChatPromise:
    name: str
    ttft_s: float
    tbt_s: float
    least_attained: float | None = None  # goals, where documents are there too
    least_tokens_s: float | None = None


OWN = "own"
DEFAULT = ChatPromise("default", 1.0, 0.1875, 99.0, 165.0)
TIGHT = ChatPromise("tight", 0.3, 0.06, 95.0, 132.0)


@dataclass(frozen=True)
class ChatRuns:
    """Runs of one load, which count as one."""

    runs: Sequence[RunRecord]
    seconds: float  # of arrivals

    def of_class(self, service: ServiceClass) -> list[RequestRecord]:
        return [request for run in self.runs for request in requests_of_class(run.requests, service)]

    @property
    def ttfts(self) -> list[float]:
        return [ttft_s(chat) for chat in finished(self.of_class(ServiceClass.RT))]

    @property
    def gaps(self) -> list[float]:
        return [gap for chat in finished(self.of_class(ServiceClass.RT)) for gap in gaps_s(chat)]

    @property
    def attained(self) -> float:
        chats = self.of_class(ServiceClass.RT)
        return 100 * sum(map(attains_p99, chats)) / max(1, len(chats))

    @property
    def tokens_s(self) -> float:
        whole = finished(self.of_class(ServiceClass.BE))
        return sum(len(document.token_at) for document in whole) / sum(run.duration_s for run in self.runs)

    @property
    def meanwhile_tokens_s(self) -> float:
        tokens = 0
        for run in self.runs:
            since, until = (run.began_at + share * self.seconds for share in (COUNTED_FROM, 1.0))
            documents = requests_of_class(run.requests, ServiceClass.BE)
            tokens += sum(since <= at < until for document in documents for at in document.token_at)
        return tokens / ((1 - COUNTED_FROM) * self.seconds * len(self.runs))


@dataclass(frozen=True)
class ChatLoad:
    """What is played, and where."""

    rate: float
    seconds: float
    documents: int
    play: Play
    file: Path  # of the workload

    def run(self, promise: ChatPromise | None, *, has_documents: bool = True) -> ChatRuns:
        """Play the load; without a promise there are no chats."""
        streams = list[dict[str, object]]()
        if promise is not None:
            streams.append({**CHAT, "rate": self.rate, "ttft_s": promise.ttft_s, "tbt_s": promise.tbt_s})
        if has_documents:
            streams.append({**DOCUMENT, **IN_FLIGHT, "in_flight": self.documents})
        return ChatRuns(self.play(save_load(self.file, self.seconds, *streams)), self.seconds)


# --- Another tenant


READING, COMPUTING = 2.0, 1.1  # times as long during a spell
SPELL_S = 4.0
_BYTES, _MEASURED_S, _SHARE = 64 << 20, 0.5, 0.5


@dataclass(eq=False)
class HoggedTruth(ProfileTruth):
    """A profiled device, of whose memory bandwidth a tenant takes half in spells.

    What steps read takes twice as long during a spell, and what they compute a tenth longer; spells and the times
    between them last four seconds on average."""

    model: CostModel
    seed: int
    now: Callable[[], float]
    _turns_at: list[float] = field(default_factory=lambda: [0.0])  # a spell ends, begins, ends, ...

    def __post_init__(self) -> None:
        super().__init__(self.model, self.seed)
        slowed = {kind: one.scaled(READING, COMPUTING) for kind, one in self.model.coefficients.items()}
        self._hogged = ProfileTruth(replace(self.model, coefficients=slowed), self.seed)
        self._chance = Random(self.seed)

    def seconds(self, plan: StepPlan) -> float:
        return self._hogged.seconds(plan) if self.is_in_spell() else super().seconds(plan)

    def is_in_spell(self) -> bool:
        while self._turns_at[-1] <= self.now():
            self._turns_at.append(self._turns_at[-1] + self._chance.expovariate(1 / SPELL_S))
        return len(self._turns_at) % 2 == 1


def copy_for_ever() -> None:
    """Copy memory at half of the rate at which this machine copies. It takes some of the processors' time too, which a
    neighbour in another virtual machine would not."""
    memory, copy = (np.ones(_BYTES, np.uint8) for _ in range(2))
    began, copies = perf_counter(), 0
    while perf_counter() < began + _MEASURED_S:
        np.copyto(copy, memory)
        copies += 1
    each_s = (perf_counter() - began) / copies
    while True:
        ends_at = perf_counter() + each_s / _SHARE
        np.copyto(copy, memory)
        sleep(max(0.0, ends_at - perf_counter()))


# --- Where it is played


class PriorityWording(IdWording):
    """Says of documents the field by which vLLM's server orders requests."""

    def __init__(self, priority: int | None) -> None:
        super().__init__(Random())  # without a seed: no run finds prompts of an earlier run
        self._more = {} if priority is None else {"priority": priority}

    def more(self, request: Request) -> dict[str, int]:
        return self._more if request.service is ServiceClass.BE else {}


def play_on(url: str, priority: int | None, workload: str) -> list[RunRecord]:
    return [played(url, workload, PriorityWording(priority))]


@contextmanager
def warmed_up(url: str, priority: int | None, has_hog: bool) -> Iterator[Play]:
    asyncio.run(ask(url, [3] * 20, 4))
    with beside(copy_for_ever, times=int(has_hog)):
        yield partial(play_on, url, priority)


def simulated(preset: str, profile: Path, seeds: Sequence[int], has_hog: bool, workload: str) -> list[RunRecord]:
    trial = SimulationTrial(preset, workload, profile=str(profile), gateway_ms=GATEWAY_MS)
    trials = [replace(trial, seed=seed) for seed in seeds]
    return [hogged(each, profile) if has_hog else record_of(each) for each in trials]


def hogged(trial: SimulationTrial, profile: Path) -> RunRecord:
    """Run the trial on the profile's device, whose memory others use in spells."""
    settings = settings_of(trial)
    world = World(trial.seed, settings.network, settings.checked)
    truth = HoggedTruth(cost_profile.load(profile).model, trial.seed, lambda: world.agenda.now)
    timing = replace(device_of(trial), truth=truth)
    return recorded(Simulation(replace(settings, timing=timing), world=world))


@contextmanager
def peer(args: argparse.Namespace, model: Path, budget: int) -> Iterator[Play]:
    with serve_vllm(args.peer_python, model, *behind_chats(budget)) as url, warmed_up(url, 1, args.hog) as play:
        yield play


@contextmanager
def deployed(args: argparse.Namespace, folder: Path, preset: str) -> Iterator[Play]:
    flags = ("--preset", preset, "--jobs-directory", str(folder / preset), *args.flags)
    with serve(args.model, *flags) as deployment, warmed_up(deployment.url, args.priority, args.hog) as play:
        yield play


def simulations(args: argparse.Namespace, folder: Path) -> Iterator[MeasuredServer]:
    machine = MACHINES[args.machine]
    machine = replace(machine, off=Uncertainty(*args.off)) if args.off else machine
    profile = folder / "steps.json"
    save_profile(profile, machine)
    for preset in args.presets:
        play = partial(simulated, preset, profile, args.seeds, args.hog)
        yield MeasuredServer(preset, nullcontext(play), has_goals=machine.has_goals)


def servers(args: argparse.Namespace, folder: Path) -> Iterator[MeasuredServer]:
    """Return what the options ask for, in order. Each server starts when its context is entered."""
    if args.url:
        yield MeasuredServer("this server", warmed_up(args.url, args.priority, args.hog), has_goals=True)
    elif args.backend == "simulated":
        yield from simulations(args, folder)
    else:
        for preset in args.presets:
            yield MeasuredServer(preset, deployed(args, folder, preset), has_goals=True)
    for budget in args.budgets if args.peer_python else ():
        yield MeasuredServer(f"vLLM, {budget} tokens a step", peer(args, args.model, budget))


# --- Figures


def own(alone: ChatRuns) -> ChatPromise:
    """Return the promise of the times that chats get alone, and a little more."""
    step_s = median(alone.gaps)
    return ChatPromise(OWN, 1.10 * percentile(alone.ttfts, 95) + step_s, 1.20 * percentile(alone.gaps, 95))


def tell(label: str, run: ChatRuns, promise: ChatPromise, documents_alone: ChatRuns | None) -> None:
    """Report a run. Only runs beside documents have goals."""
    is_beside = documents_alone is not None
    report(f"{label}: chats", len(run.of_class(ServiceClass.RT)), "1")
    for name, values, promised in (("TTFT", run.ttfts, promise.ttft_s), ("TBT", run.gaps, promise.tbt_s)):
        for percent in (50, 95, 99):
            report(f"{label}: {name} p{percent}", 1e3 * percentile(values, percent), "ms", baseline=1e3 * promised)
        in_time = 100 * sum(value <= promised for value in values) / max(1, len(values))
        goal = 95.0 if is_beside and promise.name == OWN else None
        report(f"{label}: {name} in time", in_time, "%", goal=goal, at_least=True)
    goal = promise.least_attained if is_beside else None
    report(f"{label}: chats attained", run.attained, "%", goal=goal, at_least=True)
    if documents_alone is None:
        return
    for name, service in (("chats refused or failed", ServiceClass.RT), ("BE failed", ServiceClass.BE)):
        asked = run.of_class(service)
        report(f"{label}: {name}", len(asked) - len(finished(asked)), "1", goal=0)
    alone_s, goal = documents_alone.tokens_s, promise.least_tokens_s
    report(f"{label}: BE", run.tokens_s, "tokens/s", baseline=alone_s, goal=goal, at_least=True)
    alone_s = documents_alone.meanwhile_tokens_s
    report(f"{label}: BE while chats come", run.meanwhile_tokens_s, "tokens/s", baseline=alone_s)


def measure(load: ChatLoad, promises: Sequence[str], *, server: str = "", has_goals: bool = False) -> None:
    """Report all runs of these promises. Without `has_goals`, tokens per second have no goal."""
    known = {promise.name: promise for promise in (TIGHT, DEFAULT)}
    if OWN in promises:
        alone = load.run(DEFAULT, has_documents=False)
        tell(f"{server}chats alone", alone, DEFAULT, None)
        known[OWN] = own(alone)
    documents = load.run(None)
    report(f"{server}BE alone", documents.tokens_s, "tokens/s")
    for promise in map(known.__getitem__, promises):
        promise = promise if has_goals else replace(promise, least_tokens_s=None)
        report(f"{server}{promise.name}: promised TTFT", 1e3 * promise.ttft_s, "ms")
        report(f"{server}{promise.name}: promised TBT", 1e3 * promise.tbt_s, "ms")
        if promise.name == TIGHT.name:
            tell(f"{server}tight, alone", load.run(promise, has_documents=False), promise, None)
        tell(f"{server}{promise.name}", load.run(promise), promise, documents)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of arrivals in each run")
    parser.add_argument("--rate", type=float, default=2.0, help="chats per second")
    parser.add_argument("--be", type=int, default=32, help="documents at once")
    promises = [OWN, TIGHT.name, DEFAULT.name]
    parser.add_argument("--promises", type=several(str, promises), default=promises, help="default: all three")
    parser.add_argument("--presets", type=several(str), default=["aligned"], help="default: aligned")
    parser.add_argument("--backend", choices=("real", "simulated"), default="real")
    parser.add_argument("--model", type=Path, help="real: a model folder with a tokenizer, in place of random weights")
    parser.add_argument("--url", help="real: measure a server that runs, whose model is named measured")
    parser.add_argument("--peer-python", help="real: a Python that has vLLM's CPU build")
    parser.add_argument("--budgets", type=several(int), default=[64, 128, 256, 512], help="vLLM's tokens in a step")
    parser.add_argument("--priority", type=int, help="real: field that vLLM's server orders requests by, of documents")
    parser.add_argument("--machine", choices=MACHINES, default="zen4", help="simulated")
    parser.add_argument("--off", type=several(float), help="simulated: how far predictions are off, such as 0.04,0.12")
    parser.add_argument("--hog", action="store_true", help="let another tenant take half of the memory bandwidth")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2], help="simulated")
    parser.add_argument("flags", nargs="*", help="real: more flags for `alignedserve serve`, after --")
    args = parser.parse_args()
    if args.peer_python is not None and shutil.which(args.peer_python) is None:
        parser.error(f"--peer-python {args.peer_python} is no program: name a Python that has vLLM's CPU build")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        starts_ours = args.backend == "real" and not args.url
        if starts_ours or args.peer_python:
            args.model = args.model or llama160m(folder / "model")
        every = list(servers(args, folder))
        for server in every:
            label = f"{server.name}, " if len(every) > 1 else ""
            with server.playing as play:
                load = ChatLoad(args.rate, args.seconds, args.be, play, folder / "load.yaml")
                measure(load, args.promises, server=label, has_goals=server.has_goals)
    sys.exit(status())


if __name__ == "__main__":
    main()
