"""The launcher that runs each part as a Ray actor.

Ray places the actors and sees them die; messages and KV do not travel through it. Without an address a deployment has
a Ray of its own, on this machine only, which begins and ends with it; cluster.py joins a cluster that is there, and
plans where parts go. A part that has ended is started again where there is room. The parts of a lost node come back on
other nodes, or on the node that replaces it.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from alignedserve.config.choices import TransportName
from alignedserve.config.config import Config
from alignedserve.core import Role
from alignedserve.errors import AlignedServeError
from alignedserve.kvpool.arena.shared_files import remove_ended
from alignedserve.launch.bounded_calls import BoundedCalls, NoAnswer
from alignedserve.launch.ending import AT_ONCE_S, BoundedEnd
from alignedserve.launch.keeper import NewPlace, say
from alignedserve.launch.keeper_events import PartTask
from alignedserve.launch.orders import CommandedKeeper
from alignedserve.launch.part_actor import PartActor
from alignedserve.launch.placing import (
    ClusterNode,
    Group,
    NodeType,
    NoPlace,
    Placing,
    Resources,
    fit_one,
    may_come,
    waits,
)
from alignedserve.launch.plan import LaunchMachine
from alignedserve.launch.reloading import Reloading
from alignedserve.protocol.messages import rank_of
from alignedserve.safe_path import ABOVE
from alignedserve.shell.control import HeardOrder
from alignedserve.shell.inboxes import PREFIX
from alignedserve.shell.part import PartSpec

log = logging.getLogger("alignedserve.parts")

T = TypeVar("T")

STORE_BYTES = 80 << 20  # of Ray's object store, about its smallest size: nothing is put there
LOOK_S = 0.5  # between two looks at the nodes of a cluster
_LEAST = {"memory": 1.0}  # for parts that need nothing: Ray reserves no less
CLEAN_S = 30.0  # for nodes to remove what killed parts have left in shared memory
ANSWER_S = 2.0  # for actors to answer that they stop
LOGS_S = 0.5  # for the last log lines of the parts to come through Ray, which looks for them every 0.1 s

# Variables that Ray reads as it is imported and hands on to its processes.
LINES = {  # for the log lines of parts, which Ray brings to the launcher's output
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",  # our lines name their part
    "RAY_COLOR_PREFIX": "0",
}
SETTINGS = {
    **LINES,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on loopback only: on every system, whatever the name says
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray hides no device from parts that ask it for none
}


@dataclass(frozen=True)
class _NodePlace:
    """The place of a part on a node that Ray chooses."""

    group: Any  # Ray's placement group
    bundle: int | None  # its number in the group; None: the part has no bundle, and runs beside the group on its node
    needs: Resources


class OnRay(CommandedKeeper):
    """Keeps every part as an actor: on a Ray of the deployment's own, on this machine, or on the nodes of a cluster."""

    def __init__(
        self,
        ray: Any,
        config: Config,
        specs: Sequence[PartSpec],
        reloading: Reloading,
        ending: BoundedEnd,
        groups: Sequence[Group],
        *,
        types: Sequence[NodeType] = (),
        machine: LaunchMachine | None = None,
    ) -> None:
        """`machine` is this one where Ray is the deployment's own; `types` are those of a cluster's nodes to come."""
        super().__init__(config, specs, reloading, machine)
        self._ray, self._ending = ray, ending
        self._groups, self._types, self._deployment = groups, types, specs[0].deployment
        self._calls = BoundedCalls("Ray")
        self._actors: dict[str, Any] = {}
        self._places: dict[str, _NodePlace] = {}
        self._vacant: list[_NodePlace] = []  # of parts that have gone: reserved as long as their group is
        ending.left = self._alive.copy

    def hear_signals(self) -> None:
        super().hear_signals()
        self._ending.hear_signals()

    def run(self) -> int:
        if self._machine is not None:
            for group in self._groups:
                self._reserve(group)
            return super().run()
        self.hear_signals()
        self._clean()  # what a killed launcher's parts have left
        try:
            deadline = time.monotonic() + self._config.ray.place_s
            for group, held in [(group, self._reserve(group)) for group in self._groups]:
                if not held.wait(LOOK_S):
                    say(waits(group, self._free()))
                    if not held.wait(max(0.0, deadline - time.monotonic())):
                        raise NoPlace(waits(group, self._free()))
            return super().run()
        finally:
            with suppress(self._ray.exceptions.RayError):  # where Ray's head has gone, its groups have gone with it
                for held in {place.group.id: place.group for place in self._places.values()}.values():
                    self._ray.util.remove_placement_group(held)
                self._clean()

    # --- Places

    def _reserve(self, group: Group) -> Any:
        """Reserve room for the group on one node, and on another node if that one is lost. A part that needs nothing is
        in another's bundle: in one of its own it would ask for memory, which node types of a cluster need not name."""
        needing = [part for part, needs in group.items() if any(needs.values())]
        bundles = [dict(group[part]) for part in needing] or [_LEAST]
        held = self._ray.util.placement_group(bundles, strategy="STRICT_PACK")
        for part, needs in group.items():
            self._places[part] = _NodePlace(held, needing.index(part) if part in needing else 0, needs)
        return held

    def _place(self, part: str) -> dict[str, Any]:
        """Return the options of the part's actor: its resources and its place."""
        place = self._places.get(part)
        if place is None:  # it runs beside the launcher, or it was not planned and Ray is our own
            return {"num_cpus": 0, "scheduling_strategy": self._on(self._ray.get_runtime_context().get_node_id())}
        needs, strategies = dict(place.needs), self._ray.util.scheduling_strategies
        return {
            "num_cpus": needs.pop("CPU"),
            "num_gpus": needs.pop("GPU", 0),
            "resources": needs,
            "scheduling_strategy": self._on(self._node_of(place.group))
            if place.bundle is None
            else strategies.PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=place.bundle),
        }

    def _on(self, node: str | None) -> Any:
        return self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _within(self, call: Callable[[], T]) -> T:
        """Make a call to Ray, which raises NoAnswer if it takes too long. The end has a limit of its own."""
        return self._calls.within(call) if self._kept else call()

    def make_place(self, worker: str) -> NewPlace:
        """Make a place for a worker. A worker that shares a pool's memory goes to that node. Where KV may travel, a
        prefill worker goes anywhere; a decode worker goes to a new node, with a pool, if no pool's node has room."""
        if self._machine is not None:
            return NewPlace()
        self._within(self._ray.nodes)  # what follows changes our places, so it is not left to a thread
        placing, role = placing_of(self._ray, self._config, self._types), Role(worker.partition("-")[0])
        parts, pools = placing.parts(role, worker), self._pools()
        if vacated := next(filter(None, (self._vacated_beside(pool, parts) for pool in pools.values())), None):
            self._places |= vacated
            self._vacant = [place for place in self._vacant if place not in vacated.values()]
            return NewPlace()
        if not pools or (role is Role.PREFILL and placing.may_travel):
            return self._room_for(parts)
        with_room = next((pool for pool in pools.values() if self._has_room(pool, placing.whole(role))), None)
        if with_room is None and role is Role.DECODE and placing.has_pools:
            pool = next(name for name in (f"{Role.POOL.value}-{n}" for n in itertools.count()) if name not in pools)
            return self._room_for({pool: placing.needs(Role.POOL), **parts}, pool)
        if with_room is None and self._config.topology.colocated:
            return self._room_for(parts)  # it does without a pool
        beside = with_room or next(iter(pools.values()))  # where it waits for room
        self._places |= {part: _NodePlace(beside.group, None, needs) for part, needs in parts.items()}
        return NewPlace() if with_room is not None else NewPlace(lacks=waits(parts, self._free()))

    def _vacated_beside(self, pool: _NodePlace, parts: Group) -> dict[str, _NodePlace]:
        """Return places for the parts that others have left in the pool's group; none where they are not enough."""
        vacant, found = [place for place in self._vacant if place.group.id == pool.group.id], dict[str, _NodePlace]()
        for part, needs in parts.items():
            place = next((place for place in vacant if place.needs == needs), None)
            if place is None:
                return {}
            vacant.remove(place)
            found[part] = place
        return found

    def _room_for(self, group: Group, *pools: str) -> NewPlace:
        """Reserve room for the group on a node that Ray chooses."""
        free = self._free()
        self._reserve(group)
        return NewPlace(pools, "" if fit_one(group, free) else waits(group, free))

    def _pools(self) -> dict[str, _NodePlace]:
        return {name: place for name, place in self._places.items() if name.startswith(Role.POOL.value)}

    def _has_room(self, pool: _NodePlace, needs: Resources) -> bool:
        """Return whether the pool's node has `needs` free beside all that is reserved there."""
        node = self._node_of(pool.group)
        free = self._ray._private.state.available_resources_per_node().get(node, {}) if node is not None else {}
        return all(free.get(name, 0.0) >= number for name, number in needs.items())

    def goes_with(self, worker: str) -> Sequence[str]:
        """Return the parts that end with this worker. A pool ends with the decode workers of its node and they end with
        it, but the last pool stays."""
        pools, place = self._pools(), self._places.get(worker)
        if place is None or worker.startswith(Role.PREFILL.value):
            return ()
        there = [name for name, other in self._places.items() if other.group.id == place.group.id and not rank_of(name)]
        decode = [name for name in there if name.startswith(Role.DECODE.value) and name != worker]
        if worker in pools:
            return decode
        return [name for name in there if name in pools] if len(pools) > 1 and not decode else ()

    def _node_of(self, group: Any) -> str | None:
        """Return the node on which Ray has put the group, if it has."""
        nodes = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        return next(iter(nodes.values()), None) or None

    def _free(self) -> list[ClusterNode]:
        """Return what is free on each node; Ray has no public call for that."""
        per_node = self._ray._private.state.available_resources_per_node()
        names = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
        return [ClusterNode(names[node], free) for node, free in per_node.items() if node in names]

    def _tell_why(self, spec: PartSpec) -> None:
        """Say why the part has no place yet, if it has none."""
        if self._lives[spec.name].began_at == math.inf:
            ranks = [rank.name for rank in self._ranks(spec.worker)]
            with suppress(NoAnswer):
                say(waits({name: self._places[name].needs for name in ranks}, self._within(self._free)))

    def _clean(self) -> None:
        """Remove what no process holds any more from the shared memory of the nodes."""
        clean = self._ray.remote(num_cpus=0, max_retries=0)(remove_ended)
        on_nodes = [self._on(node["NodeID"]) for node in self._ray.nodes() if node["Alive"]]
        what = Path(self._config.kvpool.directory), PREFIX, self._deployment
        runs = [clean.options(scheduling_strategy=node).remote(*what) for node in on_nodes]
        self._ray.wait(runs, num_returns=len(runs), timeout=AT_ONCE_S / 2 if self._is_hurried else CLEAN_S)

    # --- Actors

    def start(self, spec: PartSpec) -> None:
        place = self._places.get(spec.name)
        if place is not None and place.bundle is None:
            name = f"start-{spec.name}"
            threading.Thread(target=self._start_beside, args=(spec, place), name=name, daemon=True).start()
        else:
            self._start_actor(spec)
        if spec.name in self._places and not spec.rank:  # it says what all ranks need
            self.after(self._config.ray.place_s, PartTask(spec.name, spec.incarnation, partial(self._tell_why, spec)))

    def _start_beside(self, spec: PartSpec, place: _NodePlace) -> None:
        """Start the part when its pool has a node: the pool's node may just have been lost."""
        try:
            while not place.group.wait(LOOK_S) or self._node_of(place.group) is None:
                if self._places.get(spec.name) is not place:
                    return
        except Exception as error:  # Ray raises errors of many kinds
            self.ended(spec, error)
        else:
            self.later(spec, partial(self._start_actor, spec))

    def _start_actor(self, spec: PartSpec) -> None:
        self._within(partial(self._make_actor, spec))

    def _make_actor(self, spec: PartSpec) -> None:
        if not any(node["Alive"] for node in self._ray.nodes()):
            raise AlignedServeError("Ray has died, and every part with it")
        if spec.name in self._actors:
            with suppress(Exception):  # Ray raises errors of many kinds
                self._ray.kill(self._actors[spec.name])  # its process may still be there
        spec = replace(spec, config=self._lives[spec.name].spec.config)  # it may have waited long for its place
        named = type(spec.name, (PartActor,), {})  # Ray names the process by its class
        options = {
            "name": f"{spec.deployment}-{spec.name}.{spec.incarnation}",
            "max_restarts": 0,  # the keeper starts it again: it tells the router first, and counts deaths
            "max_task_retries": 0,
            "max_concurrency": 2,  # `stop`, while `run` runs
            **self._place(spec.name),
        }
        actor = self._ray.remote(named).options(**options).remote(spec.to_json())
        if self._lives[spec.name].spec.incarnation != spec.incarnation:  # Ray has answered too late
            self._ray.kill(actor)
            return
        self._actors[spec.name] = actor
        actor.__ray_ready__.remote().future().add_done_callback(lambda _: self.began(spec.name))

        def ended(run: Future[str]) -> None:
            if (error := run.exception()) is not None:
                self.ended(spec, type(error).__name__)
            else:
                self.ended(spec, 0, run.result())

        actor.run.remote().future().add_done_callback(ended)

    def ask_to_stop(self, parts: Collection[str]) -> None:
        with_place = self._actors.keys() & parts
        asked = {part: self._actors[part].stop.remote() for part in with_place}
        if asked:
            self._ray.wait([*asked.values()], num_returns=len(asked), timeout=ANSWER_S)
        for part, answer in asked.items():
            try:
                stops = bool(self._ray.get(answer, timeout=0))
            except self._ray.exceptions.RayError:
                stops = False
            if not stops:
                self.end(part)

    def _reload(self, asked: HeardOrder) -> None:
        super()._reload(asked)
        self._ending.drains_for(self._config.server.drain_s)

    def hand_on(self, spec: PartSpec) -> None:
        if spec.name in self._actors:  # or it has no place yet
            self._actors[spec.name].reload.remote(spec.to_json())

    def _stop_all(self) -> None:
        self._ending.begin(is_wanted=bool(self._orders_to_stop))
        super()._stop_all()
        self._wait_until_ended(self._alive, ANSWER_S)
        left = self._alive & self._actors.keys()
        if left and not self._is_hurried:
            say(f"{', '.join(sorted(left))} may still run where Ray does not reach them; it ends them when it does")

    def end(self, part: str) -> None:
        if part in self._actors:
            with suppress(Exception):  # Ray raises errors of many kinds; its end is not heard, and said when all ends
                self._within(partial(self._ray.kill, self._actors[part]))
        elif part in self._retiring:  # it still waits for its place
            self.ended(self._lives[part].spec, "no place")

    def forget(self, part: str) -> None:
        """End the actor of a part that has ended: its process, and what is reserved for it, may still be there."""
        if part in self._actors:
            self.end(part)
            del self._actors[part]
        super().forget(part)
        place = self._places.pop(part, None)
        if place is None:
            return
        if any(other.group.id == place.group.id for other in self._places.values()):
            self._vacant += [place] if place.bundle is not None else []
        else:
            self._vacant = [other for other in self._vacant if other.group.id != place.group.id]
            with suppress(Exception):  # Ray raises errors of many kinds; a group that is left ends with our job
                self._within(partial(self._ray.util.remove_placement_group, place.group))


def placing_of(ray: Any, config: Config, types: Sequence[NodeType]) -> Placing:
    nodes = [ClusterNode(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    may_travel = config.transport is TransportName.COLLECTIVE or config.topology.colocated
    ranks = config.engine.tensor_parallel_size
    return Placing(nodes, config.ray.gpus_per_worker or 0.0, may_travel, ranks, may_come(types, nodes))


def serve_on_ray(config: Config, specs: Sequence[PartSpec], reloading: Reloading, machine: LaunchMachine) -> int:
    """Serve until stopped, and return the exit code."""
    # A key for this deployment only; otherwise Ray shares one key among all and keeps it in the home directory.
    os.environ.update(SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
    ray = import_ray()
    group = {spec.name: {"CPU": 1.0} for spec in specs}  # the parts of a node share its memory: placed together
    ending = BoundedEnd(config.server.drain_s)
    keeper = OnRay(ray, config, specs, reloading, ending, [group], machine=machine)
    keeper.hear_signals()  # also while Ray starts, which takes seconds
    try:
        ray.init(
            address="local",  # its own, also where another Ray runs
            job_config=job_config(ray),
            num_cpus=len(specs),  # processes that Ray starts at once, for the actors
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            logging_level="warning",
        )
    except Exception as error:  # Ray raises errors of many kinds here
        raise AlignedServeError(f"Ray does not start: {error}") from error
    try:
        return keeper.run()
    finally:
        ending.begin()
        time.sleep(LOGS_S)
        ray.shutdown()


def job_config(ray: Any) -> Any:
    """Return the settings of our job: its actors find modules where this process does.

    Ray would put the working directory first on their path, but for jobs that it takes for those of a remote client."""
    return ray.job_config.JobConfig(_client_job=True, _py_driver_sys_path=[] if ABOVE in sys.path else [ABOVE])


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise AlignedServeError("the launcher ray needs Ray: pip install 'alignedserve[ray]'") from None
    return ray
