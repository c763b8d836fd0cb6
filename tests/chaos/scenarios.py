"""The deployments that trials hurt: every topology and launcher, each with the faults that it can have here."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from tests.chaos.absent import Absent
from tests.chaos.clock import WallClock
from tests.chaos.faults import (
    KINDS,
    QUIET_S,
    STILL_S,
    ChangeKeys,
    CutWire,
    Fault,
    FillDisk,
    FillMemory,
    Freeze,
    Hang,
    HungRay,
    Kill,
    KillLauncher,
    KillRedis,
    LimitMemory,
    LoseNode,
    Midnight,
    NoFork,
    OneWay,
    Order,
    PauseAll,
    ReplaceWeights,
    SlowDisk,
    SlowRedis,
    Starve,
    StepClock,
    TornWrite,
)
from tests.chaos.losses import BadWires, DiskErrors, FlipPages, ForgetRedis, LossyWire
from tests.chaos.memory_group import MemoryGroup
from tests.chaos.networks import machines
from tests.chaos.no_fork import ProcessRoom
from tests.chaos.parts import Parts
from tests.chaos.recording import KEYS
from tests.chaos.wires import Wires
from tests.cluster.conftest import clustered
from tests.end_to_end.deployment import MODEL, Deployment, deployed, free_port
from tests.planted import Hangs
from tests.power_cut import Power
from tests.redis_server import RedisServer
from tests.small_disk import SmallDisk, small_disk

T = TypeVar("T")
_DIRECT = ("--transport", "collective")
_RANKS = ("--tensor-parallel-size", "2")
_POOL = ("--pool-memory-mb", "64")  # fits the disk below
_DISK, _SHARED_MEMORY = "16m", "100m"
_USUAL = (*_POOL, "--set", "engine.tune_s=0")  # each worker would tune for seconds
_KEYS = ("--keys-file", str(KEYS))


@dataclass
class Stage:
    """A running deployment, and what can hurt it."""

    deployment: Deployment
    parts: Parts
    faults: list[Fault]
    absent: list[str]  # why some faults are not there


@dataclass(frozen=True)
class Scenario:
    name: str
    topology: str
    launcher: str
    flags: tuple[str, ...] = ()
    redis: bool = False  # whether jobs are kept there, and not on a small disk
    hangs: bool = False  # whether parts hang beside being killed, and clocks do not step
    rests: bool = True  # whether clients get tokens before some of the faults
    faults: Sequence[str] = KINDS  # the kinds that strike
    setting: Callable[[Scenario, ExitStack], Stage] = field(kw_only=True)

    @contextmanager
    def staged(self) -> Iterator[Stage]:
        with ExitStack() as stack:
            stage = self.setting(self, stack)
            stage.faults = [fault for fault in stage.faults if fault.kind in self.faults]
            yield stage


class _Means:
    """The things that faults need, as far as this machine has them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True))
        )
        self.absent: list[str] = []

    def disk(self, name: str, size: str) -> SmallDisk | None:
        return self._try(lambda: self._stack.enter_context(small_disk(self.folder / name, size)))

    def redis(self) -> RedisServer | None:
        (folder := self.folder / "redis").mkdir()
        server = self._try(lambda: RedisServer(folder))
        if server is not None:
            self._stack.callback(server.kill)
        return server

    def clock(self) -> WallClock | None:
        return self._try(lambda: WallClock(self.folder))

    def wires(self) -> Wires | None:
        return self._try(lambda: Wires(self.folder))

    def memory_group(self) -> MemoryGroup | None:
        return self._try(MemoryGroup)

    def room(self) -> ProcessRoom | None:
        return self._try(lambda: ProcessRoom(self.folder))

    def power(self, disk: SmallDisk) -> Power | None:
        return self._try(lambda: Power(disk.folder, self.folder / "power"))

    def _try(self, get: Callable[[], T]) -> T | None:
        try:
            return get()
        except (Absent, pytest.skip.Exception) as why:
            self.absent.append(str(why))
            return None


def _on_processes(scenario: Scenario, stack: ExitStack) -> Stage:
    means = _Means(stack)
    clock = None if scenario.hangs else means.clock()
    hangs = Hangs(means.folder) if scenario.hangs else None
    redis = means.redis() if scenario.redis else None
    disk = None if scenario.redis else means.disk("disk", _DISK)
    power = None if disk is None or scenario.hangs else means.power(disk)
    room, wires = (None, None) if scenario.hangs else (means.room(), means.wires())
    group = None if scenario.hangs else means.memory_group()
    memory = None if "colocated" in scenario.topology else means.disk("memory", _SHARED_MEMORY)
    store = ("--jobs-store", redis.url) if redis is not None else ()
    model, keys = Path(shutil.copytree(MODEL, means.folder / "model")), Path(shutil.copy(KEYS, means.folder))
    deployment = stack.enter_context(
        deployed(
            *(*scenario.flags, *store, *_USUAL, *_watched(scenario), "--keys-file", str(keys)),
            *("--port", str(free_port())),
            topology=scenario.topology,
            model=model,
            memory=None if memory is None else memory.folder,
            environment={
                **_preloading(*(each.environment for each in (clock, power, room, wires) if each is not None)),
                **({} if disk is None else {"ALIGNEDSERVE_JOBS_DIRECTORY": str(disk.folder / "jobs")}),
            },
            measured=True,
            plant="" if hangs is None else hangs.plant,
        )
    )
    parts = Parts(deployment.processes)
    faults: list[Fault] = [Kill(parts), Freeze(parts) if hangs is None else Hang(parts, hangs)]
    if not scenario.hangs:
        faults += [KillLauncher(deployment), PauseAll(deployment, parts), Starve(parts), Order(deployment)]
        faults += [ReplaceWeights(model / "model.safetensors", parts), ChangeKeys(keys, deployment)]
        faults += [] if "colocated" in scenario.topology else [FlipPages(deployment.memory)]
    faults += [] if clock is None else [StepClock(clock), Midnight(clock, deployment)]
    faults += [] if disk is None else [FillDisk(disk)]
    faults += [] if power is None else [SlowDisk(power), TornWrite(power, parts), DiskErrors(power)]
    faults += [] if room is None else [NoFork(room, parts)]
    faults += [] if wires is None else [BadWires(wires, parts)]
    faults += [] if group is None else [LimitMemory(group, parts)]
    faults += [] if memory is None else [FillMemory(memory, parts)]
    faults += [] if redis is None else [KillRedis(redis), SlowRedis(redis), ForgetRedis(redis)]
    return Stage(deployment, parts, faults, means.absent)


def _preloading(*environments: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of all, with the libraries of each."""
    libraries = ":".join(each["LD_PRELOAD"] for each in environments)
    merged = {name: value for each in environments for name, value in each.items()}
    return merged | ({"LD_PRELOAD": libraries} if libraries else {})


def _on_ray(scenario: Scenario, stack: ExitStack) -> Stage:
    means = _Means(stack)
    clock = None if scenario.hangs else means.clock()
    environment = {} if clock is None else clock.environment
    flags = (*scenario.flags, *_USUAL, *_KEYS, *_watched(scenario))
    deployment = stack.enter_context(
        deployed(*flags, topology=scenario.topology, launcher="ray", environment=environment, measured=True)
    )
    parts = Parts(deployment.processes)
    steps = [] if clock is None else [StepClock(clock)]
    others = [Hang(parts)] if scenario.hangs else [Freeze(parts), HungRay(parts)]
    return Stage(deployment, parts, [Kill(parts), *others, *steps], means.absent)


def _watched(scenario: Scenario) -> tuple[str, ...]:
    return ("--set", f"launch.still_s={STILL_S}", "--set", f"launch.quiet_s={QUIET_S}") if scenario.hangs else ()


_PROMPTS, _DECODES = {"CPU": 2, "prefill": 2}, {"CPU": 2, "kv_pool": 1, "decode": 1}
_SOON = ("--set", "wire.transfer_timeout_s=3", "--profile-s", "0")


def _on_nodes(scenario: Scenario, stack: ExitStack) -> Stage:
    """Parts on a node have the clock of the deployment's machine, and step with the others (clock.c)."""
    means = _Means(stack)
    clock = means.clock()
    stepped = {} if clock is None else clock.environment
    nodes = stack.enter_context(clustered(_PROMPTS, _DECODES, _DECODES, environment=stepped))
    flags = ("--ray-address", nodes.address, *_SOON, *scenario.flags, *_USUAL, *_KEYS)
    deployment = stack.enter_context(
        deployed(*flags, topology=scenario.topology, launcher="ray", environment=nodes.environment, measured=True)
    )
    parts = Parts(lambda: deployment.processes() | nodes.processes())
    steps = [] if clock is None else [StepClock(clock)]
    hurts = [Kill(parts), Freeze(parts), HungRay(parts), LoseNode(nodes, 1, _DECODES)]
    return Stage(deployment, parts, [*hurts, *steps], means.absent)


def _on_machines(scenario: Scenario, stack: ExitStack) -> Stage:
    network = stack.enter_context(machines(_PROMPTS, _DECODES, _DECODES))
    flags = ("--ray-address", network.address, *_SOON, *scenario.flags, *_USUAL, *_KEYS)
    deployment = stack.enter_context(
        deployed(*flags, topology=scenario.topology, launcher="ray", environment=network.environment, measured=True)
    )
    parts = Parts(lambda: deployment.processes() | network.processes())
    cuts = [CutWire(wire) for wire in network.wires]
    hurts = [Kill(parts), Freeze(parts), HungRay(parts), OneWay(network.roads), LossyWire(network.wires)]
    return Stage(deployment, parts, [*hurts, *cuts], [])


SCENARIOS = [
    Scenario("colocated", "colocated", "processes", setting=_on_processes),
    Scenario("2xcolocated", "2xcolocated", "processes", redis=True, setting=_on_processes),
    Scenario("1+1", "1+1", "processes", setting=_on_processes),
    Scenario("2+1", "2+1", "processes", setting=_on_processes),
    Scenario("2+2-direct", "2+2", "processes", _DIRECT, redis=True, setting=_on_processes),
    Scenario("ranks", "colocated", "processes", _RANKS, setting=_on_processes),
    Scenario("1+1-ranks-direct", "1+1", "processes", (*_RANKS, *_DIRECT), setting=_on_processes),
    Scenario("colocated-ray", "colocated", "Ray", setting=_on_ray),
    Scenario("1+1-ray", "1+1", "Ray", setting=_on_ray),
    Scenario("2+2-nodes", "2+2", "Ray, 3 nodes", _DIRECT, setting=_on_nodes),
    Scenario("2+1-nodes", "2+1", "Ray, 3 nodes", _DIRECT, setting=_on_nodes),
    Scenario("1+2-machines", "1+2", "Ray, 3 networks", _DIRECT, setting=_on_machines),
]
