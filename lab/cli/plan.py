"""`alignedserve plan`: finds the cheapest deployment that keeps its promises, by simulations in several processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from time import monotonic
from typing import Any

from alignedserve.architectures.quantization import Quantization
from alignedserve.cli.terminal.arguments import check_writable
from alignedserve.config.config import dump, every_setting, load, of_preset, plain, settings
from alignedserve.config.setting import leaves
from alignedserve.config.sources import read_yaml
from alignedserve.config.topology import Topology
from alignedserve.core import ServiceClass
from alignedserve.errors import ConfigError, ProfileError, SimulateError
from alignedserve.interrupt import INTERRUPTED, hear_sigterm_as_ctrl_c
from alignedserve.lab.cli.flags import WhatIsPlanned
from alignedserve.lab.devices import devices
from alignedserve.lab.loads.figures.tables import write
from alignedserve.lab.loads.workload import Mixture
from alignedserve.lab.loads.workload.amounts import Fixed
from alignedserve.lab.loads.workload.build import USUAL_REQUESTS
from alignedserve.lab.loads.workload.pace import Recorded
from alignedserve.lab.loads.workload.stream import Span
from alignedserve.lab.planning.demand import Expected, WorkerCapacity, demand_of, expected_requests, family_of
from alignedserve.lab.planning.deployments import DeploymentFamily, DeviceOffer, PlannedDeployment
from alignedserve.lab.planning.outcome import Hopeless, Outcome, PromisesToKeep, RequestTally
from alignedserve.lab.planning.report import Plan, plan_document, plan_text, plot_plan
from alignedserve.lab.planning.search import PlanTrial, Search
from alignedserve.lab.processes import Processes, one_for_each_core, processes
from alignedserve.lab.reports import plots
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.trials.building import cluster_of, config_of, device_of, settings_of, workload_of
from alignedserve.progress import ProgressBar, about

_FRESH = 3  # seeds of the check
_RANKS = (1, 2, 4, 8)  # GPUs of a worker, for devices that name a GPU alone
_USUAL_S, _LEAST_S = 60.0, 30.0  # of arrivals, where the workload does not say how long they last
_MANY = 3000  # requests, with which arrivals last less long
_LOADS = (0.6, 0.8, 1.2, 1.5)  # times the workload's, in the picture
_NOTHING_KEEPS = 1  # the status where no deployment keeps the promises


def run(asked: WhatIsPlanned) -> int:
    began_at = monotonic()
    hear_sigterm_as_ctrl_c()
    be_attain = asked.attain if asked.be_attain is None else asked.be_attain
    promise = PromisesToKeep(asked.attain, be_attain, asked.be_tokens)
    for path in filter(None, (asked.out, asked.plot, asked.json)):
        check_writable(path)
    if asked.plot is not None:
        plots.check(asked.plot)
    common = _common_trial(asked)
    workload = workload_of(common)
    if asked.be_tokens and all(stream.promise.service is ServiceClass.RT for stream in workload.streams):
        raise SimulateError("--be-tokens is of documents: no stream of --workload has service=be")
    families = [family for offer in _offers(asked) for family in _families(asked, common, offer)]
    fresh = range(asked.seed + 1, asked.seed + 1 + _FRESH)
    search = Search(families, promise, asked.workers, asked.seed, fresh)
    loads, is_interrupted = list[tuple[float, Outcome]](), False
    jobs = asked.jobs or one_for_each_core()
    with processes(jobs) as started:
        simulations = _Simulations(common, workload, promise, started, jobs, search.num_left)
        names = ", ".join(dict.fromkeys(family.offer.device for family in families))
        about_them = f"1 to {asked.workers} workers of {names}, in about {search.num_left()} simulations"
        print(f"plan: tries {about_them}; Ctrl-C shows what is found until then", file=sys.stderr, flush=True)
        try:
            _carry_out(search, simulations)
            loads = _loads(search, workload, simulations) if asked.plot is not None else []
        except KeyboardInterrupt:
            is_interrupted = True  # what was found until now is the answer
    took_s, question = monotonic() - began_at, _question(asked, common, promise)
    notes = _notes(asked, workload)
    plan = Plan(search, promise, asked.workers, question, took_s, is_interrupted, loads, notes)
    _write(plan, asked, common, workload)
    print(plan_text(plan), end="")
    if plan.is_interrupted:
        return INTERRUPTED
    return 0 if search.answer is not None else _NOTHING_KEEPS


# --- The question


def _common_trial(asked: WhatIsPlanned) -> SimulationTrial:
    """Return what all simulations share. A workload that does not say how long it lasts gets a time."""
    trial = SimulationTrial(asked.preset, asked.workload, options=asked.settings)
    workload = workload_of(trial)
    if any(stream.span != Span(USUAL_REQUESTS) for stream in workload.streams):
        return trial
    lasts_s = min(_USUAL_S, max(_LEAST_S, _MANY / workload.rate)) if workload.rate else _USUAL_S
    return replace(trial, workload=f"{asked.workload},first_s={lasts_s:.0f}")


def _question(asked: WhatIsPlanned, common: SimulationTrial, promise: PromisesToKeep) -> dict[str, object]:
    about = {name: getattr(asked, name) for name in ("model", "price_kwh", "workers", "preset", "settings", "seed")}
    return {"workload": common.workload, **asdict(promise), "devices": asked.device, **about}


def _notes(asked: WhatIsPlanned, workload: Mixture) -> list[str]:
    """Return what the user should know of the prices and the check."""
    notes = []
    if asked.price_kwh is not None:
        notes.append(f"Prices have the energy of GPUs that always compute, at {asked.price_kwh:g} a kWh.")
    traces = [stream for stream in workload.streams if isinstance(stream.arrivals, Recorded)]
    if all(stream.window_s for stream in traces):
        return notes
    return [*notes, "Every seed has the trace as it is, so the check proves little: window_s=30 draws windows of it."]


def _offers(asked: WhatIsPlanned) -> list[DeviceOffer]:
    """Return every device that the user names, each once."""
    priced = [_priced(text) for text in asked.device]
    if asked.devices is not None:
        priced += [(str(name), price) for name, price in read_yaml(asked.devices).items()]
    offers = [offer for name, price in priced for offer in _offers_of(name, _price(name, price), asked.model)]
    if asked.price_kwh is not None:
        offers = [_with_energy(offer, asked.price_kwh) for offer in offers]
    for number, offer in enumerate(offers):
        if any(offer.device == earlier.device for earlier in offers[:number]):
            raise ConfigError(f"--device {offer.device} is given twice")
    return offers


def _with_energy(offer: DeviceOffer, price_kwh: float) -> DeviceOffer:
    """Return the offer at a price that has the energy of a GPU that always computes."""
    watts = devices.watts_of(offer.device)
    if watts is None:
        raise ConfigError(f"--price-kwh: nobody knows what {offer.device} takes: add its energy to its price instead")
    return replace(offer, gpu_price=offer.gpu_price + watts / 1e3 * price_kwh)


def _priced(text: str) -> tuple[str, str]:
    name, colon, price = text.rpartition(":")
    if not colon or not name:
        raise ConfigError(f"--device {text!r:.60} has no price: write DEVICE:PRICE, such as {text.strip(':')}:3.90")
    return name, price


def _price(name: str, price: object) -> float:
    try:
        found = float(price) if isinstance(price, str | int | float) and not isinstance(price, bool) else 0.0
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise ConfigError(f"the price of {name} must be a number above 0, for a GPU and hour, not {price!r:.40}")
    return found


def _offers_of(name: str, price: float, model: str | None) -> list[DeviceOffer]:
    """Return the offer of a device; of a GPU alone one for each number of GPUs that hold the model."""
    if name not in devices.GPUS:
        return [DeviceOffer(name, price, _gpus_of(name))]
    if model is None or devices.model_named(model) is None:
        known = f"--model, one of {', '.join(devices.MODELS)}, in bf16 or with -int8 or -int4 after it"
        raise ConfigError(f"--device {name} is a GPU alone: it needs {known}" + (f", not {model}" if model else ""))
    found = [DeviceOffer(device, price, ranks) for ranks in _RANKS if _fits(device := f"{name}-{model}-tp{ranks}")]
    if not found:
        _gpus_of(f"{name}-{model}-tp{_RANKS[-1]}")  # says why
    return found


def _fits(device: str) -> bool:
    try:
        return _gpus_of(device) > 0
    except ProfileError:
        return False


def _gpus_of(device: str) -> int:
    return device_of(SimulationTrial("aligned", profile=device)).gpus


def _families(asked: WhatIsPlanned, common: SimulationTrial, offer: DeviceOffer) -> Iterator[DeploymentFamily]:
    """Yield the families of a device; presets that are for prefill workers have no colocated ones."""
    trial = _on(common, PlannedDeployment(offer, Topology()))
    settings, device = settings_of(trial), device_of(trial)
    demand = demand_of(workload_of(common).within(device.kv_tokens), asked.be_tokens, asked.seed)
    capacity = WorkerCapacity.of(device, settings.limits, demand)
    only_parted = not Topology.parse(cluster_of([asked.preset])).colocated
    for parted in (True,) if only_parted else (False, True):
        yield family_of(offer, parted, demand, capacity)


# --- Simulations


@dataclass(frozen=True, slots=True)
class _SimulationTask:
    """A simulation for one of the processes."""

    number: int
    trial: SimulationTrial
    promise: PromisesToKeep
    expected: Expected


def _simulate(task: _SimulationTask) -> tuple[int, Outcome]:
    """Return the task's number, and what counts of the run: neither steps nor requests are kept."""
    simulation = Simulation(replace(settings_of(task.trial), record=False))
    tally = RequestTally(task.promise, task.expected)
    simulation.clients.on_end = tally.hear
    with suppress(Hopeless):
        simulation.run()
    if simulation.problems:
        raise SimulateError(f"{task.trial.title}: {simulation.problems[0]}")
    return task.number, tally.outcome()


class _Simulations:
    """Simulates what the search wants, and shows how far it is."""

    def __init__(
        self,
        common: SimulationTrial,
        workload: Mixture,
        promise: PromisesToKeep,
        started: Processes,
        jobs: int,
        num_left: Callable[[], int],
    ) -> None:
        self._jobs, self._num_left, self._began_at = jobs, num_left, monotonic()
        self._common, self._rate, self._promise, self._started = common, workload.rate, promise, started
        self._expected = expected_requests(workload)
        self._num_done = 0

    def outcomes(self, trials: Sequence[PlanTrial], label: str) -> Iterator[tuple[PlanTrial, Outcome]]:
        """Yield each trial with its outcome."""
        with ProgressBar(label, sys.stderr) as bar:
            for number, outcome in self._started.as_done(_simulate, map(self._task, count(), trials)):
                self._num_done += 1
                yield trials[number], outcome  # the search learns of it, and knows how many are left
                left, took_s = self._num_left(), monotonic() - self._began_at
                left_s = left * took_s / max(self._num_done, self._jobs)
                if self._num_done == 1 and left:
                    bar.note(f"plan: the first simulation took {took_s:.1f} s: {about(left_s)} for about {left} more")
                bar.show(self._num_done, self._num_done + left, left_s if left else None)

    def _task(self, number: int, trial: PlanTrial) -> _SimulationTask:
        rate = None if trial.load == 1 else trial.load * self._rate
        asked = replace(_on(self._common, trial.deployment), seed=trial.seed, rate=rate)
        return _SimulationTask(number, asked, self._promise, {} if trial.is_whole else self._expected)


def _on(common: SimulationTrial, deployment: PlannedDeployment) -> SimulationTrial:
    return replace(common, cluster=str(deployment.topology), profile=deployment.offer.device)


def _carry_out(search: Search, simulations: _Simulations) -> None:
    while trials := search.wanted():
        best = search.answer
        label = f"best so far: {best}, {best.price:.2f} an hour" if best else "nothing found yet"
        for trial, outcome in simulations.outcomes(trials, label):
            search.hear(trial, outcome)


def _loads(search: Search, workload: Mixture, simulations: _Simulations) -> list[tuple[float, Outcome]]:
    """Return how the answer does at other arrivals in a second; nothing for workloads that have no rate."""
    if search.answer is None or not workload.rate:
        return []
    trials = [PlanTrial(search.answer, search.seed, is_whole=True, load=load) for load in _LOADS]
    outcomes = {trial.load: outcome for trial, outcome in simulations.outcomes(trials, "other loads")}
    outcomes[1.0] = search.found[search.answer][search.fresh[0]]
    return [(load * workload.rate, outcomes[load]) for load in sorted(outcomes)]


# --- What is written


def _write(plan: Plan, asked: WhatIsPlanned, common: SimulationTrial, workload: Mixture) -> None:
    answer = plan.search.answer
    if asked.json is not None:
        write(asked.json, plan_document(plan))
    if asked.plot is not None:
        plot_plan(plan, asked.plot)
    if asked.out is not None and answer is not None:
        write(asked.out, settings_text(_on(common, answer), answer, workload))
        load({}, {}, asked.out)  # as `serve --config` reads it


# --- The settings that start the deployment of a plan


_NODE = 8  # GPUs of a machine: more are on a Ray cluster
_HUB = {  # a model of devices.py -> its id on the hub
    "opt-6.7b": "facebook/opt-6.7b",
    "opt-13b": "facebook/opt-13b",
    "opt-30b": "facebook/opt-30b",
    "opt-66b": "facebook/opt-66b",
    "codellama-34b": "codellama/CodeLlama-34b-hf",
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "yi-34b": "01-ai/Yi-34B-Chat",
}


def settings_text(trial: SimulationTrial, answer: PlannedDeployment, workload: Mixture) -> str:
    """Return YAML with what differs from the defaults of the trial's preset. What no file can say is in comments."""
    import yaml

    own = _of_answer(answer)
    given = dict(leaves(config_of(trial))) | own | _promises(workload)
    usual = dict(leaves(of_preset(trial.preset, {})))
    changed = {path: value for path, value in given.items() if value != usual[path] or path in ("preset", "model")}
    deployed = of_preset(trial.preset, changed)  # refuses what does not go together
    tree = dump(deployed, changed.keys() & settings().keys())
    said = [f"# {answer}: {answer.price:.2f} an hour. alignedserve serve --config THIS\n"]
    said += [] if "model" in own else ["# model: change it to the folder or the hub id of the model\n"]
    said += [
        f"# --set {path}={str(plain(value)).lower()}\n" for path, value in changed.items() if path not in settings()
    ]
    return "".join(said) + yaml.safe_dump(tree, sort_keys=False)


def _of_answer(answer: PlannedDeployment) -> dict[str, Any]:
    """Return the settings of a deployment's hardware."""
    declared = every_setting()
    found: dict[str, Any] = {
        "topology": answer.topology,
        "engine.device": declared["engine.device"].kind("cuda"),
        "engine.tensor_parallel_size": answer.offer.gpus,
    }
    if (model := _model_of(answer.offer.device)) is not None:
        found["model"] = model
        kinds = (kind for kind in Quantization if f"-{kind.value}-tp" in answer.offer.device)
        found["engine.quantization"] = next(kinds, Quantization.NONE)
    if answer.gpus > _NODE:
        found["launcher"] = declared["launcher"].kind("ray")
        found |= {"ray.address": "auto", "ray.gpus_per_worker": 1.0}
    return found


def _model_of(device: str) -> str | None:
    """Return the hub id of a named device's model, if it is known."""
    return next((hub for name, hub in _HUB.items() if f"-{name}-tp" in device or f"-{name}-int" in device), None)


def _promises(workload: Mixture) -> dict[str, float]:
    """Return the promises of chats, if all chats of the workload have the same."""
    promised = {stream.promise for stream in workload.streams if stream.promise.service is ServiceClass.RT}
    if len(promised) != 1:
        return {}
    promise = promised.pop()
    match promise.ttft_s, promise.tbt_s, promise.slo_factor:
        case Fixed(ttft_s), Fixed(tbt_s), Fixed(factor):
            return {"slo.ttft_ms": 1000 * factor * ttft_s, "slo.tbt_ms": 1000 * factor * tbt_s}
    return {}
