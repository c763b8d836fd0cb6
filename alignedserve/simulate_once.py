"""`run_once(trial, on_progress) -> RunRecord`: the one place that knows how a trial becomes a run of the simulator.

What users write (a preset, a workload, a cluster, a profile) becomes the simulator's settings here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter

from alignedserve import cost_profile
from alignedserve.config import Topology
from alignedserve.core import StepPlan
from alignedserve.errors import SimulateError
from alignedserve.simulator import gpu_truth, workload
from alignedserve.simulator.engine import Costs
from alignedserve.simulator.records import RunRecord
from alignedserve.simulator.run import Settings, Simulation
from alignedserve.simulator.trial import OnProgress, Trial
from alignedserve.simulator.workload import Workload

PRESETS = {"fcfs": Settings(record=True)}  # first come, first served: what the cores do today


def run_once(trial: Trial, on_progress: OnProgress) -> RunRecord:
    simulation = Simulation(settings_of(trial))
    simulation.on_progress = on_progress
    began_at = perf_counter()
    simulation.run()
    return simulation.record(perf_counter() - began_at)


def settings_of(trial: Trial) -> Settings:
    if trial.preset not in PRESETS:
        raise SimulateError(f"there is no preset {trial.preset!r:.60}: there is {', '.join(PRESETS)}")
    preset = PRESETS[trial.preset]
    return replace(
        preset,
        seed=trial.seed,
        workload=_at_rate(parse_workload(trial.workload), trial.rate),
        topology=parse_cluster(trial.cluster),
        costs=preset.costs if trial.profile is None else ProfileCosts(step_seconds=read_profile(trial.profile)),
    )


# --- Workload


def parse_workload(text: str | None) -> Workload:
    """By `workload.parse` where the simulator has it; until then as fields, such as num_requests=50,rate=10."""
    if text is None:
        return Workload()
    parse = getattr(workload, "parse", _parse_fields)
    try:
        parsed: Workload = parse(text)
    except ValueError as error:
        raise SimulateError(f"--workload {text!r:.60} is not understood: {error}") from None
    return parsed


def _parse_fields(text: str) -> Workload:
    known = {name: type(value) for name, value in asdict(Workload()).items()}
    values = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"there is no {name!r:.40}, but {', '.join(known)}")
        values[name] = known[name](value)
    return replace(Workload(), **values)


def _at_rate(drawn: Workload, rate: float | None) -> Workload:
    return drawn if rate is None else replace(drawn, rate=rate)


# --- Cluster


def parse_cluster(text: str) -> Topology:
    """`colocated`, `P+D`, or `Nx colocated`: N workers that each run prompts and decodes."""
    match = re.fullmatch(r"([1-9][0-9]{0,3}) ?x ?colocated", text)
    try:
        return Topology(0, int(match[1])) if match else Topology.parse(text)
    except ValueError:
        raise SimulateError(f"--cluster {text!r:.60} is neither colocated, nor such as 2+2 or 4x colocated") from None


# --- Profile


@dataclass(frozen=True)
class ProfileCosts(Costs):
    """Steps as a profile has them; copies as ever."""

    step_seconds: Callable[[StepPlan], float] = field(kw_only=True)

    def of_step(self, plan: StepPlan) -> float:
        return self.step_seconds(plan)


def read_profile(name: str) -> Callable[[StepPlan], float]:
    """A GPU that was measured, by its name, or a file that `alignedserve profile` wrote."""
    if name in gpu_truth.names():
        return gpu_truth.load(name).seconds
    if not Path(name).is_file():
        raise SimulateError(f"--profile {name!r:.60} is no file, and none of {', '.join(gpu_truth.names())}")
    return cost_profile.load(Path(name)).model.plan_seconds
