"""Turns what users ask for into the simulator's settings: `settings_of(trial) -> Settings`.

Only here a preset, settings that outweigh it, a workload, a cluster, a profile and policies become a simulated
deployment, for the command line and for Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from alignedserve.config.choices import TransportName
from alignedserve.config.config import Config, every_setting, of_preset
from alignedserve.config.presets import DEFAULT, preset
from alignedserve.config.sections import GPU_SEATS, GPU_STEP_TOKENS
from alignedserve.config.sources import hint, read_settings
from alignedserve.config.topology import Topology
from alignedserve.core import WorkerLimits
from alignedserve.cost.model import Route
from alignedserve.errors import ConfigError, SimulateError, WorkloadError
from alignedserve.lab.devices import devices, gpu_truth, hardware
from alignedserve.lab.devices.hardware import Hardware
from alignedserve.lab.loads import defaults
from alignedserve.lab.loads.workload import Mixture
from alignedserve.lab.loads.workload.spec import rate_of, read_workload
from alignedserve.lab.loads.workload.stream import Foresight
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.settings import Settings
from alignedserve.router.placing.admission import Queues
from alignedserve.scheduling.policy import Policy, Predictor

# Replace the defaults, which suit a CPU and a single gateway: a worker has the seats that it has on a GPU.
_GPUS = {
    "engine.max_step_tokens": GPU_STEP_TOKENS,
    "engine.max_batch": GPU_SEATS,
    "server.max_open": 100_000,
    "server.max_queue": 100_000,
    "server.max_queue_tokens": 1_000_000_000,
}
_SHARED = ("kvpool.compression", "engine.look_ahead", *_GPUS)
_PREDICTOR = "schedule.predictor"
_IS_DIRECT = {None: None, "host": False, "direct": True}  # None: as the preset says
_LONGEST = 16_384  # tokens of a request among the steps that workers know when they start
_ARENA = 4  # device caches' worth of pages in the pool, for each decode worker


def trial_of(
    presets: Sequence[str],
    workload: str | None,
    cluster: str | None,
    profile: str,
    transport: str | None,
    gateway_ms: float,
    options: Sequence[str],
) -> SimulationTrial:
    """Return what all runs of these presets share, as users name it: on the command line, or in Python."""
    if transport not in _IS_DIRECT:
        raise SimulateError(f"transport must be host or direct, not {transport!r:.40}")
    cluster, direct = cluster or cluster_of(presets), _IS_DIRECT[transport]
    return SimulationTrial(
        presets[0], workload, cluster, profile=profile, direct=direct, options=tuple(options), gateway_ms=gateway_ms
    )


def settings_of(trial: SimulationTrial, given: Mixture | None = None) -> Settings:
    config, device, topology = config_of(trial), device_of(trial), parse_cluster(trial.cluster)
    direct = config.transport is TransportName.COLLECTIVE and not topology.colocated
    if trial.direct and topology.colocated:
        raise SimulateError(f"--transport direct is from prefill to decode workers: --cluster {topology} has none")
    policy, limits = _policy_of(trial, config), _limits(trial, device, config)
    workload = workload_of(trial, given)
    has_effect = policy.predictor is Predictor.ORACLE
    if not has_effect and any(stream.foresight != Foresight() for stream in workload.streams):
        raise SimulateError(f"--workload: predicted has no effect without --set {_PREDICTOR}=oracle")
    if policy.block_use.keeps_hidden and not device.truth.hidden_token_s():
        raise SimulateError(f"schedule.memory hybrid: {device.name}'s model keeps no hidden vectors: set it to plain")
    longest = min(_LONGEST, device.kv_tokens)
    is_direct = direct if trial.direct is None else trial.direct
    lenders = topology.prefill_workers if policy.prefill_decodes else 0
    pages = _ARENA * (topology.decode_workers + lenders) * device.kv_tokens // limits.page_size
    device = device.divided(pages, policy)
    return Settings(
        seed=trial.seed,
        topology=topology,
        workload=workload.within(device.kv_tokens),
        limits=limits,
        policy=policy,
        most_open=config.server.max_open,
        queues=Queues.of_chats(config.server.max_queue, config.server.max_queue_tokens),
        num_pages=pages,
        extents=device.extents,
        timing=device,
        belief=partial(hardware.belief, device.truth, limits, longest),
        copying=device.links[Route.ARENA_TO_DEVICE].copying(device.kv_bytes),
        gateway_s=trial.gateway_ms / 1000,
        direct=is_direct,
        checked=False,
        most_s=float("inf"),
        record=True,
        look_ahead=config.engine.steps_ahead(policy),
        copies_beside=device.copies_beside,
        layers=device.layers,
    )


def config_of(trial: SimulationTrial) -> Config:
    """Return the configuration that a deployment would have; a simulation does not know all settings."""
    given = read_settings(trial.options, "--set", every_setting())
    for path in given:
        if not simulates(path):
            known = f"it has all of schedule, and {', '.join(_SHARED)}"
            raise SimulateError(f"--set {path}: a simulation has no such setting: {known}")
    if _knows_lengths(given):
        del given[_PREDICTOR]
    try:
        return of_preset(trial.preset, given, _GPUS)
    except ConfigError as error:
        raise SimulateError(f"{'' if trial.preset == DEFAULT else f'--preset {trial.preset}: '}{error}") from None


def _policy_of(trial: SimulationTrial, config: Config) -> Policy:
    """Return the policy of the configuration, or the same with lengths that are known before."""
    knows_lengths = _knows_lengths(read_settings(trial.options, "--set", every_setting()))
    return replace(config.policy, predictor=Predictor.ORACLE) if knows_lengths else config.policy


def _knows_lengths(given: Mapping[str, object]) -> bool:
    """Return whether the simulator is to say how long outputs are: no deployment can, so no configuration has it."""
    return given.get(_PREDICTOR) is Predictor.ORACLE


def simulates(path: str) -> bool:
    return path in _SHARED or path.startswith("schedule.")


def cluster_of(presets: Sequence[str]) -> str:
    """Return the cluster of the presets, for users who name none; the presets have to agree."""
    wanted = {str(of_preset(name, {}).topology) for name in presets}
    if len(wanted) > 1:
        raise SimulateError(f"--cluster is needed: these presets are for {' and '.join(sorted(wanted))}")
    return wanted.pop()


def _limits(trial: SimulationTrial, device: Hardware, config: Config) -> WorkerLimits:
    """Return the limits of the workers. A measured worker brings its own, which a preset or --set may only lower."""
    engine, measured = config.engine, device.measured
    if measured is not None and not config.policy.drops:
        measured = replace(measured, reach=None, fold=None)
    if measured is None:
        return device.limits(engine.step_tokens, engine.seats)
    said = {**preset(trial.preset).settings, **read_settings(trial.options, "--set", every_setting())}
    most = {"max_step_tokens": engine.step_tokens, "max_batch": engine.seats}
    least: dict[str, Any] = {name: min(number, getattr(measured, name)) for name, number in most.items()}
    return replace(measured, **{name: value for name, value in least.items() if f"engine.{name}" in said})


def workload_of(trial: SimulationTrial, given: Mixture | None = None) -> Mixture:
    try:
        asked = given or read_workload(trial.workload or defaults.WORKLOAD)
    except WorkloadError as error:
        raise SimulateError(f"--workload: {str(error).removeprefix('workload: ')}") from None
    try:
        return asked if trial.rate is None else asked.at_rate(trial.rate)
    except WorkloadError as error:
        raise SimulateError(f"--rates: {error}") from None


def check_rates(common: SimulationTrial, rates: Sequence[float]) -> None:
    """Refuse rates beside a rate in the workload's words."""
    if rates and (said := rate_of(common.workload or "")):
        raise SimulateError(f"--rates takes the place of {said} in --workload: leave one of them out")


def parse_cluster(text: str) -> Topology:
    """Return the topology that the text writes: `colocated`, `Nxcolocated`, or `P+D`."""
    try:
        if not (topology := Topology.parse(text)).is_auto:
            return topology
        raise ValueError(text)
    except ValueError:
        wanted = f"--cluster {text!r:.60} is neither colocated, nor such as 2+2 or 4xcolocated"
        raise SimulateError(f"{wanted}{_cluster_hint(text)}") from None


def _cluster_hint(text: str) -> str:
    """Return a question for the cluster that was probably meant: two numbers are prefill and decode workers, a single
    number is workers of both."""
    counts = [int(digits) for digits in re.findall(r"\d{1,9}", text) if int(digits)]
    meant = "+".join(map(str, counts)) if len(counts) > 1 else "".join(f"{count}xcolocated" for count in counts)
    try:
        return f": did you mean {Topology.parse(meant)}?"
    except ValueError:
        return hint(text.lower(), ["colocated"])


def device_of(trial: SimulationTrial) -> Hardware:
    """Return the hardware: a GPU by its name, or what a file says of a device."""
    name = trial.profile or defaults.PROFILE
    if name in gpu_truth.names() or devices.named(name):
        return hardware.from_gpu(name)
    if Path(name).is_file():
        return hardware.from_file(Path(name), trial.seed)
    measured = gpu_truth.names()
    near = hint(name, dict.fromkeys((*measured, *devices.names_with_one_gpu())))
    known = f"nor one of {', '.join(measured)}, nor {devices.HOW_NAMED}"
    raise SimulateError(f"--profile {name!r:.60} is neither a file {known}{near}")
