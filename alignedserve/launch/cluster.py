"""The launcher for a Ray cluster that is there already (`ray up`, `ray start`, KubeRay): parts are actors on its nodes.

The launcher runs on the node whose address users know, with the router and the gateway beside it; placing.py says
which parts go where. Links have keys, which travel to the parts with their specs. A part that has ended is started
again where there is room. The parts of a lost node come back on other nodes, or on the node that replaces it.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from alignedserve.config.config import Config, DeviceKind, TransportName, dump
from alignedserve.core import Role
from alignedserve.errors import AlignedServeError
from alignedserve.kvpool.arena.shared_files import remove_stale
from alignedserve.launch.ending import AT_ONCE_S, Ending
from alignedserve.launch.keeper import NewPlace, PartTask, say
from alignedserve.launch.node_types import NodeType, may_come, node_types
from alignedserve.launch.placing import NAMED, ClusterNode, Group, NoPlace, Placing, Resources, fit_one, waits
from alignedserve.launch.plan import new_deployment, parts_of
from alignedserve.launch.ray_actors import LINES, OnRay, in_group, job_config, no_ray
from alignedserve.machine.model_folder import model_folder
from alignedserve.protocol.messages import rank_of
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.control import door_of
from alignedserve.shell.inboxes import PREFIX
from alignedserve.shell.listener import bind
from alignedserve.shell.part import PartSpec
from alignedserve.store.storage import check_storage

CONNECT_S = 5.0
LOOK_S = 0.5  # between two looks at the nodes of the cluster
_LEAST = {"memory": 1.0}  # for a part that needs nothing: Ray reserves no less
CLEAN_S = 30.0  # for nodes to remove what killed parts have left in shared memory


def serve_on_cluster(config: Config) -> int:
    """Serve until stopped, and return the exit code."""
    os.environ.update(LINES)
    try:
        import ray
    except ImportError:
        raise no_ray() from None
    config = _for_every_node(config)
    types = node_types(config.ray.cluster_file) if config.ray.cluster_file is not None else []
    ending = Ending(config.server.drain_s)
    _join(ray, config)
    try:
        host = ray.util.get_node_ip_address()
        with bind(host, 0) as router:  # bound as long as this process lives, as in `serve`
            config, groups = _wait_for_nodes(ray, config, types)
            specs = _plan(config, groups, host, f"tcp://{host}:{router.getsockname()[1]}")
            return _OnCluster(ray, config, specs, ending, groups, types).run()
    finally:
        ending.begin()
        ray.shutdown()


def _for_every_node(config: Config) -> Config:
    """Return the config that all nodes get. A model's folder or file has the same path on every node; each node itself
    looks up a hub id, and makes the folder of a GGUF file."""
    model_folder(config)
    named = config.served_model_name or config.model
    return replace(config, served_model_name=named, jobs=check_storage(config.jobs, named, config.server.port))


def _join(ray: Any, config: Config) -> None:
    address = config.ray.address
    try:
        if found := re.fullmatch(r"([^:/]+):(\d+)", address or ""):  # or Ray would try for minutes
            socket.create_connection((found[1], int(found[2])), CONNECT_S).close()
        ray.init(address=address, logging_level="warning", namespace="alignedserve", job_config=job_config(ray))
    except Exception as error:  # Ray raises errors of many kinds here
        none = f"there is no Ray cluster at {address} (ray.address), or its token is not ours (RAY_AUTH_TOKEN_PATH)"
        raise AlignedServeError(f"{none}: {error}") from error


def _wait_for_nodes(ray: Any, config: Config, types: Sequence[NodeType]) -> tuple[Config, list[Group]]:
    """Return the groups of parts as soon as nodes have room, and the config with the device that these nodes have:
    `ray up` ends with the head, other nodes come later."""
    deadline, said = time.monotonic() + config.ray.place_s, ""
    parts = parts_of(config)
    prefill, decode = ([name for role, name in parts if role is kind] for kind in (Role.PREFILL, Role.DECODE))
    while True:
        placing = _placing(ray, config, types)
        decided = decide_by_nodes(config, placing)
        try:
            groups = replace(placing, gpus_per_worker=decided.ray.gpus_per_worker or 0.0).groups(prefill, decode)
        except NoPlace as error:
            why = f"{error}{_advice(config, decided)}"
            if time.monotonic() > deadline:
                raise NoPlace(why) from None
            if why != said:
                say(f"waits for nodes: {why}")
            said = why
        else:
            if config.engine.device is DeviceKind.AUTO:
                say(f"workers compute on {'GPUs' if decided.engine.on_gpu else 'CPUs'}: the nodes' resources say so")
            return decided, groups
        time.sleep(LOOK_S)


def decide_by_nodes(config: Config, placing: Placing) -> Config:
    """Return the config with a device, and the GPUs of each rank. The launcher's own node may have no GPU, so the nodes
    decide: `auto` takes GPUs where they are reserved, or where a node of the cluster, or one that may come, has a GPU
    and room for a decode worker beside it."""
    engine, gpus = config.engine, config.ray.gpus_per_worker
    if engine.device is DeviceKind.AUTO:
        on_gpus = replace(placing, gpus_per_worker=1.0).has_node_for(Role.DECODE) if gpus is None else gpus > 0
        engine = replace(engine, device=DeviceKind.CUDA if on_gpus else DeviceKind.CPU)
    reserved = float(engine.on_gpu) if gpus is None else gpus
    return replace(config, engine=engine, ray=replace(config.ray, gpus_per_worker=reserved))


def _advice(config: Config, decided: Config) -> str:
    """Return what to set where there is no room on GPUs that nobody has asked for."""
    asked = config.engine.device is not DeviceKind.AUTO or config.ray.gpus_per_worker is not None
    if asked or not decided.engine.on_gpu:
        return ""
    return (
        "; nodes have GPUs, so each rank of a worker gets one: ray.gpus_per_worker 0.5, with"
        " engine.kv_memory_mb, lets two workers share it, and engine.device cpu takes none"
    )


def _placing(ray: Any, config: Config, types: Sequence[NodeType]) -> Placing:
    nodes = [ClusterNode(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    may_travel = config.transport is TransportName.COLLECTIVE or config.topology.colocated
    ranks = config.engine.tensor_parallel_size
    return Placing(nodes, config.ray.gpus_per_worker or 0.0, may_travel, ranks, may_come(types, nodes))


def _plan(config: Config, groups: Sequence[Group], host: str, router: str) -> list[PartSpec]:
    """Return the specs of all parts; several nodes with workers have several pools."""
    deployment, tree = new_deployment(), dump(config)
    door, origin = str(door_of(config.server.port)), ClockOrigin.read()
    parts = [(Role(name.partition("-")[0]), name, rank_of(name)) for group in groups for name in group]
    here = [(role, name, 0) for role, name in parts_of(config) if role not in NAMED]
    return [
        PartSpec(
            *(role, name, "" if role in NAMED else "head", deployment, host, router, tree, origin),
            rank=rank,
            door=door,
        )
        for role, name, rank in (*here, *parts)
    ]


@dataclass(frozen=True)
class _NodePlace:
    """The place of a part on a node that Ray chooses."""

    group: Any  # Ray's placement group
    bundle: int | None  # its number in the group; None: the part has no bundle, and runs beside the group on its node
    needs: Resources


class _OnCluster(OnRay):
    def __init__(
        self,
        ray: Any,
        config: Config,
        specs: Sequence[PartSpec],
        ending: Ending,
        groups: Sequence[Group],
        types: Sequence[NodeType],
    ) -> None:
        super().__init__(ray, config, specs, ending)
        self._groups, self._types = groups, types
        self._places: dict[str, _NodePlace] = {}
        self._here = ray.get_runtime_context().get_node_id()

    def run(self) -> int:
        self.hear_signals()
        self._clean()  # what a killed launcher's parts have left
        try:
            deadline = time.monotonic() + self._config.ray.place_s
            for group, held in [(group, self._reserve(group)) for group in self._groups]:
                if held.wait(LOOK_S):
                    continue
                say(waits(group, self._free()))
                if not held.wait(max(0.0, deadline - time.monotonic())):
                    raise NoPlace(waits(group, self._free()))
            return super().run()
        finally:
            for held in {place.group.id: place.group for place in self._places.values()}.values():
                self._ray.util.remove_placement_group(held)
            self._clean()

    def _reserve(self, group: Group) -> Any:
        """Reserve room for the group on one node, and on another node if that node is lost."""
        bundles = [dict(needs) if any(needs.values()) else _LEAST for needs in group.values()]
        held = self._ray.util.placement_group(bundles, strategy="STRICT_PACK")
        for bundle, (part, needs) in enumerate(group.items()):
            self._places[part] = _NodePlace(held, bundle, needs)
        return held

    def place(self, part: str) -> dict[str, Any]:
        place = self._places.get(part)
        if place is None:
            here = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self._here, soft=False)
            return {"num_cpus": 0, "scheduling_strategy": here}
        needs, affinity = dict(place.needs), self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        strategy = (
            affinity(self._node_of(place.group), soft=False)
            if place.bundle is None
            else in_group(self._ray, place.group, place.bundle)
        )
        return {
            "num_cpus": needs.pop("CPU"),
            "num_gpus": needs.pop("GPU", 0),
            "resources": needs,
            "scheduling_strategy": strategy,
        }

    def make_place(self, worker: str) -> NewPlace:
        """Make a place for a worker. A worker that shares a pool's memory goes to that node. Where KV may travel, a
        prefill worker goes anywhere; a decode worker goes to a new node, with a pool, if no pool's node has room."""
        placing, role = _placing(self._ray, self._config, self._types), Role(worker.partition("-")[0])
        parts, pools = placing.parts(role, worker), self._pools()
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

    def _room_for(self, group: Group, *pools: str) -> NewPlace:
        """Reserve room for the group on a node that Ray chooses."""
        free = self._free()
        self._reserve(group)
        return NewPlace(pools, "" if fit_one(group, free) else waits(group, free))

    def _pools(self) -> dict[str, _NodePlace]:
        return {name: place for name, place in self._places.items() if name.startswith(Role.POOL.value)}

    def _has_room(self, pool: _NodePlace, needs: Resources) -> bool:
        """Return whether the pool's node has so much free beside all that is reserved there."""
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

    def end(self, part: str) -> None:
        if part in self._actors or part not in self._retiring:
            super().end(part)
        else:  # it still waits for its place
            self.ended(self._lives[part].spec, "no place")

    def _node_of(self, group: Any) -> str | None:
        """Return the node on which Ray has put the group, if it has."""
        nodes = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        return next(iter(nodes.values()), None) or None

    def forget(self, part: str) -> None:
        super().forget(part)
        place = self._places.pop(part, None)
        if place is not None and all(other.group.id != place.group.id for other in self._places.values()):
            with suppress(Exception):  # Ray raises errors of many kinds; a group that is left ends with our job
                self._ray.util.remove_placement_group(place.group)

    def start(self, spec: PartSpec) -> None:
        if spec.rank and not spec.ranks_at:
            return  # it is started once rank 0 has a place and says where the ranks meet
        place = self._places.get(spec.name)
        if place is not None and place.bundle is None:
            threading.Thread(
                target=self._start_beside, args=(spec, place), name=f"start-{spec.name}", daemon=True
            ).start()
        else:
            super().start(spec)
        if spec.name in self._places:
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
            self.later(spec, partial(super().start, spec))

    def launch(self, actor: Any, spec: PartSpec) -> None:
        """Run the part. The node of several ranks is not known before: rank 0 says where they meet."""
        if spec.rank or len(self._ranks(spec.worker)) == 1:
            super().launch(actor, spec)
        else:
            actor.meeting.remote().future().add_done_callback(lambda asked: self._met(actor, spec, asked))

    def _met(self, actor: Any, spec: PartSpec, asked: Future[str]) -> None:
        error = asked.exception()
        if error is None:
            self.later(spec, lambda: self._launch_ranks(actor, replace(spec, ranks_at=asked.result())))
        else:
            self.ended(spec, type(error).__name__)

    def _launch_ranks(self, actor: Any, first: PartSpec) -> None:
        super().launch(actor, first)
        for rank in self._ranks(first.worker):
            if rank.rank:
                name, number, device = rank.name, rank.rank, rank.device
                self.start(replace(first, name=name, rank=number, device=device))

    def _tell_why(self, spec: PartSpec) -> None:
        """Say why the part has no place yet, if it has none."""
        if self._lives[spec.name].began_at == math.inf:
            ranks = [rank.name for rank in self._ranks(spec.worker)]
            say(waits({name: self._places[name].needs for name in ranks}, self._free()))

    def _free(self) -> list[ClusterNode]:
        """Return what is free on each node; Ray has no public call for that."""
        per_node = self._ray._private.state.available_resources_per_node()
        names = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
        return [ClusterNode(names[node], free) for node, free in per_node.items() if node in names]

    def _clean(self) -> None:
        """Remove what no process holds any more from the shared memory of the nodes."""
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        clean = self._ray.remote(num_cpus=0, max_retries=0)(_remove_stale)
        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        runs = [
            clean.options(scheduling_strategy=affinity(node, soft=False)).remote(self._config.kvpool.directory)
            for node in nodes
        ]
        self._ray.wait(runs, num_returns=len(runs), timeout=AT_ONCE_S / 2 if self._is_hurried else CLEAN_S)


def _remove_stale(directory: str) -> None:
    remove_stale(Path(directory), PREFIX)
