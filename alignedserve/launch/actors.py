"""The host that runs each part as a Ray actor: on a Ray of its own, or on the nodes of a cluster (cluster.py).

Ray places the actors and sees them die; messages and KV do not travel through it. A part that has ended is started
again where there is room. The parts of a lost node come back on other nodes, or on the node that replaces it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from alignedserve.config.config import Config
from alignedserve.core import Role
from alignedserve.errors import AlignedServeError
from alignedserve.launch.bounded import AT_ONCE_S, BoundedCalls
from alignedserve.launch.host import Host, NewPlace, NoAnswer, PartBegan, PartTask, say
from alignedserve.launch.nodes import LOOK_S, ClusterNodes
from alignedserve.launch.placing import NAMED, ClusterNode, Group, NoPlace, Resources, fit_one, waits
from alignedserve.launch.plan import parts_of
from alignedserve.launch.start import PartActor
from alignedserve.machine.shared_files import remove_ended
from alignedserve.protocol.messages import rank_of
from alignedserve.shell.links import PREFIX
from alignedserve.shell.part import PartSpec

T = TypeVar("T")

_LEAST = {"memory": 1.0}  # for parts that need nothing: Ray reserves no less
_NODE_LABEL = "ray.io/node-id"  # of each node, by Ray
_SOON_S = 1.0  # for Ray to find a node where there is room
CLEAN_S = 30.0  # for nodes to remove what killed parts have left in shared memory
ANSWER_S = 2.0  # for actors to answer that they stop


@dataclass(frozen=True)
class _NodePlace:
    """The place of a part on a node that Ray chooses."""

    group: Any  # Ray's placement group
    bundle: int | None  # its number in the group; None: the part has no bundle, and runs beside the group on its node
    needs: Resources


class Actors(Host):
    """Runs every part as an actor."""

    WHY_LEFT = "Ray does not reach them, and ends them when it does"

    def __init__(
        self,
        ray: Any,
        config: Config,
        deployment: str,
        groups: Sequence[Group],
        *,
        nodes: ClusterNodes | None = None,
        homes: Sequence[str] = (),
    ) -> None:
        """`nodes` are those of a cluster, and `homes` has the id of a node with room for each group; without them Ray
        is the deployment's own."""
        super().__init__()
        self.numbers_devices = nodes is None
        self._ray, self._config, self._deployment = ray, config, deployment
        self._groups, self._nodes, self._homes = groups, nodes, homes
        self._calls = BoundedCalls("Ray")
        self._specs: dict[str, PartSpec] = {}  # of the newest life of each part, with its newest settings
        self._waiting: set[str] = set()  # parts whose newest life has no actor yet
        self._began: set[str] = set()  # parts whose actor is there
        self._actors: dict[str, Any] = {}
        self._places: dict[str, _NodePlace] = {}
        self._vacant: list[_NodePlace] = []  # of parts that have gone: reserved as long as their group is

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Have room for the groups of parts, and leave nothing on the nodes of a cluster in the end."""
        if self._nodes is None:
            for group in self._groups:
                self._reserve(group)
            yield
            return
        self._clean()  # what a killed launcher's parts have left
        try:
            deadline = time.monotonic() + self._config.ray.patience_s
            of_pools = {home for group, home in zip(self._groups, self._homes, strict=True) if _has_pool(group)} - {""}
            for group, home in zip(self._groups, self._homes, strict=True):
                self._reserve(group, of_pools - {home} if _has_pool(group) else ())
            for group, home in zip(self._groups, self._homes, strict=True):
                others = of_pools - {home} if _has_pool(group) else set[str]()
                self._wait_for_node(group, others, deadline, self._nodes)
            for line in self._nodes.table(self._config, self._placed(), self._here()):
                say(line)
            yield
        finally:
            with suppress(self._ray.exceptions.RayError):  # where Ray's head has gone, its groups have gone with it
                for held in {place.group.id: place.group for place in self._places.values()}.values():
                    self._ray.util.remove_placement_group(held)
                self._clean()

    # --- Places

    def _reserve(self, group: Group, avoids: Collection[str] = ()) -> Any:
        """Reserve room for the group on one node, and on another node if that one is lost: not on those that it
        `avoids`, which have pools, nor on those that cannot serve. A part that needs nothing is in another's bundle: in
        one of its own it would ask for memory, which node types of a cluster need not name."""
        needing = [part for part, needs in group.items() if any(needs.values())]
        bundles = [dict(group[part]) for part in needing] or [_LEAST]
        avoids = sorted({*avoids, *(self._nodes.left_out if self._nodes is not None else ())})
        elsewhere = [{_NODE_LABEL: f"!in({','.join(avoids)})"}] * len(bundles) if avoids else None
        held = self._ray.util.placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=elsewhere)
        for part, needs in group.items():
            self._places[part] = _NodePlace(held, needing.index(part) if part in needing else 0, needs)
        return held

    def _wait_for_node(self, group: Group, avoids: set[str], deadline: float, nodes: ClusterNodes) -> None:
        """Wait until the group has a node that can serve: one that has just come looks at itself first."""
        while True:
            held = self._places[next(iter(group))].group
            if not held.wait(_SOON_S):
                say(waits(group, self._free()))
                if not held.wait(max(0.0, deadline - time.monotonic())):
                    raise NoPlace(waits(group, self._free()))
            nodes.look()
            if self._node_of(held) not in nodes.left_out:
                return
            self._ray.util.remove_placement_group(held)
            self._reserve(group, avoids)

    def _placed(self) -> dict[str, str]:
        """Return the node of each part that has one."""
        return {part: node for part, place in self._places.items() if (node := self._node_of(place.group)) is not None}

    def _here(self) -> list[str]:
        """Return the parts that run beside the launcher."""
        return [name for role, name in parts_of(self._config) if role not in NAMED]

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
        return call() if self.is_ending else self._calls.within(call)

    def make_place(self, worker: str) -> NewPlace:
        """Make a place for a worker. A worker that shares a pool's memory goes to that node. Where KV may travel, a
        prefill worker goes anywhere; a decode worker goes to a new node, with a pool, if no pool's node has room."""
        if self._nodes is None:
            return NewPlace()
        self._within(self._ray.nodes)  # what follows changes our places, so it is not left to a thread
        self._within(self._nodes.look)
        placing, role = self._nodes.placing(self._config), Role(worker.partition("-")[0])
        parts, pools = placing.parts(role, worker), self._pools()
        if vacated := next(filter(None, (self._vacated_beside(pool, parts) for pool in pools.values())), None):
            self._places |= vacated
            self._vacant = [place for place in self._vacant if place not in vacated.values()]
            return NewPlace()
        if not pools or (role is Role.PREFILL and placing.may_travel):
            return self._room_for(parts)
        with_room = next((pool for pool in pools.values() if self._has_room(pool, placing.whole(role))), None)
        if with_room is None and role is Role.DECODE and placing.has_pools and placing.may_travel:
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
        """Reserve room for the group on a node that Ray chooses, and for a pool on one that has none."""
        taken = {self._node_of(place.group) or "" for place in self._pools().values()} if pools else set[str]()
        free = [node for node in self._free() if node.id not in taken]
        self._reserve(group, taken - {""})
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
        left_out = self._nodes.left_out if self._nodes is not None else ()
        found = [node for node in per_node.items() if node[0] in names and node[0] not in left_out]
        return [ClusterNode(names[node], free, node) for node, free in found]

    def _tell_why(self, worker: str) -> None:
        """Say why the worker has no place yet, if it has none."""
        ranks = [name for name, spec in self._specs.items() if spec.worker == worker]
        if worker not in self._began:
            with suppress(NoAnswer):
                say(waits({name: self._places[name].needs for name in ranks}, self._within(self._free)))

    def _clean(self) -> None:
        """Remove what no process holds any more from the shared memory of the nodes."""
        clean = self._ray.remote(num_cpus=0, max_retries=0)(remove_ended)
        on_nodes = [self._on(node["NodeID"]) for node in self._ray.nodes() if node["Alive"]]
        what = Path(self._config.kvpool.directory), PREFIX, self._deployment
        runs = [clean.options(scheduling_strategy=node).remote(*what) for node in on_nodes]
        self._ray.wait(runs, num_returns=len(runs), timeout=AT_ONCE_S / 2 if self.is_hurried else CLEAN_S)

    # --- Actors

    def start(self, spec: PartSpec) -> None:
        self._specs[spec.name] = spec
        self._began.discard(spec.name)
        self._waiting.add(spec.name)
        place = self._places.get(spec.name)
        if place is not None and place.bundle is None:
            name = f"start-{spec.name}"
            threading.Thread(target=self._start_beside, args=(spec, place), name=name, daemon=True).start()
        else:
            self._start_actor(spec)
        if spec.name in self._places and not spec.rank:  # it says what all ranks need
            task = PartTask(spec.name, spec.incarnation, partial(self._tell_why, spec.name))
            self.events.after(self._config.ray.patience_s, task)

    def _start_beside(self, spec: PartSpec, place: _NodePlace) -> None:
        """Start the part when its pool has a node: the pool's node may just have been lost."""
        try:
            while not place.group.wait(LOOK_S) or self._node_of(place.group) is None:
                if self._places.get(spec.name) is not place:
                    return
        except Exception as error:  # Ray raises errors of many kinds
            self.events.ended(spec, error)
        else:
            self.events.put(PartTask(spec.name, spec.incarnation, partial(self._start_actor, spec)))

    def _start_actor(self, spec: PartSpec) -> None:
        self._within(partial(self._make_actor, spec))

    def _make_actor(self, spec: PartSpec) -> None:
        if not any(node["Alive"] for node in self._ray.nodes()):
            raise AlignedServeError("Ray has died, and every part with it")
        if spec.name in self._actors:
            with suppress(Exception):  # Ray raises errors of many kinds
                self._ray.kill(self._actors[spec.name])  # its process may still be there
        spec = replace(spec, config=self._specs[spec.name].config)  # it may have waited long for its place
        named = type(spec.name, (PartActor,), {})  # Ray names the process by its class
        options = {
            "name": f"{spec.deployment}-{spec.name}.{spec.incarnation}",
            "max_restarts": 0,  # the keeper starts it again: it tells the router first, and counts deaths
            "max_task_retries": 0,
            "max_concurrency": 2,  # `stop`, while `run` runs
            **self._place(spec.name),
        }
        actor = self._ray.remote(named).options(**options).remote(spec.to_json())
        if self._specs[spec.name].incarnation != spec.incarnation:  # Ray has answered too late
            self._ray.kill(actor)
            return
        self._actors[spec.name] = actor
        self._waiting.discard(spec.name)

        def began(_: Future[Any]) -> None:
            self._began.add(spec.name)
            self.events.put(PartBegan(spec.name, spec.incarnation))

        def ended(run: Future[str]) -> None:
            if (error := run.exception()) is not None:
                self.events.ended(spec, type(error).__name__)
            else:
                self.events.ended(spec, 0, run.result())

        actor.__ray_ready__.remote().future().add_done_callback(began)
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

    def hand_on(self, spec: PartSpec) -> None:
        self._specs[spec.name] = spec
        if spec.name in self._actors:  # or it has no place yet
            self._actors[spec.name].reload.remote(spec.to_json())

    def end(self, part: str) -> None:
        if part in self._actors:
            with suppress(Exception):  # Ray raises errors of many kinds; its end is not heard, and said when all ends
                self._within(partial(self._ray.kill, self._actors[part]))
        if part in self._waiting:  # what was killed, if anything, is its life before
            self.events.ended(self._specs[part], "no place")

    def forget(self, part: str) -> None:
        """End the actor of a part that has ended: its process, and what is reserved for it, may still be there."""
        if part in self._actors:
            self.end(part)
            del self._actors[part]
        self._waiting.discard(part)
        self._specs.pop(part, None)
        place = self._places.pop(part, None)
        if place is None:
            return
        if any(other.group.id == place.group.id for other in self._places.values()):
            self._vacant += [place] if place.bundle is not None else []
        else:
            self._vacant = [other for other in self._vacant if other.group.id != place.group.id]
            with suppress(Exception):  # Ray raises errors of many kinds; a group that is left ends with our job
                self._within(partial(self._ray.util.remove_placement_group, place.group))


def _has_pool(group: Group) -> bool:
    return any(part.startswith(Role.POOL.value) for part in group)
