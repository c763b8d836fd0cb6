"""Choose the nodes of a cluster for all parts, or say in words why they do not fit.

The router and the gateway run where the deployment was started: users and parts know their addresses. All other parts
are in groups, each on one node: workers that share a pool share the memory of its node. If one node has room for all,
they are one group. Else each node gets its share of both kinds of workers by how many it has room for, on as few nodes
as are enough: of 4+4 on two nodes with four GPUs each has 2+2. A prefill worker is on a node with a pool and decode
workers, or where KV may travel (`transport: direct`, `collective`) on any. The ranks of a worker are on one node. If
the present nodes have no room, nodes that may come count, too.

Nodes may say what they are for by resources that are named after roles (`ray start --resources '{"decode": 8}'`); a
role that no node names runs anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import yaml

from alignedserve.core import WORKERS, Role
from alignedserve.errors import AlignedServeError, ConfigError
from alignedserve.protocol.messages import rank_suffix

NAMED = {Role.POOL: "kv_pool", Role.PREFILL: "prefill", Role.DECODE: "decode"}
_SHOWN = ("CPU", "GPU", *NAMED.values())

Resources: TypeAlias = Mapping[str, float]
Group: TypeAlias = Mapping[str, Resources]  # parts that share a node: name -> needs


class NoPlace(AlignedServeError):
    """The cluster has no room for the deployment."""


@dataclass(frozen=True)
class ClusterNode:
    name: str
    total: Resources
    id: str = ""  # Ray's; of a node that may come nobody knows it


class PlacedGroup(NamedTuple):
    group: Group
    node: ClusterNode  # that has room for it


@dataclass
class _NodeRoom:
    """The resources that a node has left while parts are placed there."""

    node: ClusterNode
    resources: dict[str, float]
    group: dict[str, Resources] = field(default_factory=dict)

    def take(self, parts: Group) -> None:
        self.resources = _less(self.resources, _sum(parts.values()))
        self.group |= parts


@dataclass(frozen=True)
class Placing:
    """The nodes, and what workers need there."""

    nodes: Sequence[ClusterNode]
    gpus_per_worker: float
    may_travel: bool  # whether KV may go from node to node, or need not
    ranks: int = 1  # of each worker
    may_come: Sequence[ClusterNode] = ()  # nodes that Ray's autoscaler starts for parts without a place

    def parts(self, role: Role, name: str) -> Group:
        """Return the parts of one worker: each rank has a CPU, and GPUs, of its own."""
        first, names = self.needs(role), set(NAMED.values())
        other = {resource: number for resource, number in first.items() if resource not in names}
        return {f"{name}{rank_suffix(rank)}": other if rank else first for rank in range(self.ranks)}

    def whole(self, role: Role) -> Resources:
        """Return what a worker needs with all its ranks."""
        return _sum(self.parts(role, "").values())

    def needs(self, role: Role) -> Resources:
        """Return what a part without ranks, or rank 0, needs."""
        offered = {resource for node in self._all for resource in node.total}
        named = {NAMED[role]: 1.0} if NAMED[role] in offered else {}
        gpus = {"GPU": self.gpus_per_worker} if role in WORKERS and self.gpus_per_worker else {}
        return {"CPU": float(role in WORKERS), **gpus, **named}  # a pool computes little

    @property
    def has_pools(self) -> bool:
        """Return whether there may be several pools, each on a node of its own."""
        return all(node.total.get(NAMED[Role.POOL], 0.0) <= 1 for node in self._all)

    def has_node_for(self, role: Role) -> bool:
        """Return whether a node, there or to come, offers in all what one rank of a worker needs."""
        return any(_fits(self.needs(role), node.total) for node in self._all)

    @property
    def _all(self) -> Sequence[ClusterNode]:
        return (*self.nodes, *self.may_come)

    def groups(self, prefill: Sequence[str], decode: Sequence[str]) -> list[Group]:
        """Return groups of these workers and of pools for them; raises NoPlace if the nodes have too little room even
        when nothing else runs there."""
        return [placed.group for placed in self.placed(prefill, decode)]

    def placed(self, prefill: Sequence[str], decode: Sequence[str]) -> list[PlacedGroup]:
        """Return the same, each group with a node that has room for it."""
        try:
            return self._placed(prefill, decode)
        except NoPlace:
            if not self.may_come:
                raise
            return replace(self, nodes=self._all, may_come=())._placed(prefill, decode)

    def _placed(self, prefill: Sequence[str], decode: Sequence[str]) -> list[PlacedGroup]:
        whole = {"pool-0": self.needs(Role.POOL)}
        for role, names in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for name in names:
                whole |= self.parts(role, name)
        for node in self.nodes:
            if _fits(_sum(whole.values()), node.total):
                return [PlacedGroup(whole, node)]
        if not self.has_pools and not prefill:  # they do without
            rooms = [_NodeRoom(node, dict(node.total)) for node in self.nodes]
            return self._each_anywhere(decode, Role.DECODE, rooms)
        if not self.has_pools:
            raise NoPlace(
                f"no node has room for all, and a node has one pool: start each with the resource `kv_pool` 1 at most; "
                f"{_named(self.nodes)}"
            )
        return self._spread([*prefill], [*decode], _sum(whole.values()))

    def _spread(self, prefill: list[str], decode: list[str], whole: Resources) -> list[PlacedGroup]:
        """Share the workers out by how many each node has room for; a second round places what is left over."""
        left = [_NodeRoom(node, dict(node.total)) for node in self.nodes]
        is_colocated, room = not prefill, {id(node): self._room(node.resources, bool(prefill)) for node in left}
        left.sort(key=lambda node: -room[id(node)])  # stable
        with_pool = [node for node in left if self._num(Role.DECODE, _less(node.resources, self.needs(Role.POOL)))]
        used = _enough(with_pool, [room[id(node)] for node in with_pool], len(decode) + len(prefill))[: len(decode)]
        rooms = [room[id(node)] for node in used]
        shares = zip(rooms, _shares(len(prefill), rooms), _shares(len(decode), rooms), strict=True)
        for number, (node, (most, prompts, decodes)) in enumerate(zip(used, shares, strict=True)):
            node.take({f"pool-{number}": self.needs(Role.POOL)})
            self._take(node, Role.PREFILL, prefill, min(prompts, most - 1))  # one has to decode
            self._take(node, Role.DECODE, decode, decodes)
        for node in used:
            self._take(node, Role.DECODE, decode, len(decode))
            self._take(node, Role.PREFILL, prefill, len(prefill))
        if decode and not is_colocated:
            needs = _sum((self.needs(Role.POOL), self.whole(Role.DECODE)))
            raise NoPlace(f"{decode[0]} has no place: with a pool it needs {_said(needs)}; {_named(self.nodes)}")
        if not self.may_travel and (prefill or not (is_colocated or all(map(_has_both, used)))):
            raise NoPlace(
                f"KV does not go from node to node, so one node has to have {_said(whole)}, or each of several workers"
                " of both kinds: set `topology: auto` for numbers that fit, or `transport: direct`;"
                f" {_named(self.nodes)}"
            )
        placed = [PlacedGroup(node.group, node.node) for node in used if node.group]
        rest, role = (decode, Role.DECODE) if is_colocated else (prefill, Role.PREFILL)
        return [*placed, *self._each_anywhere(rest, role, left)]

    def _room(self, resources: Resources, with_prefill: bool) -> int:
        """Return how many workers fit there beside a pool, of both kinds in turn."""
        left, num = _less(resources, self.needs(Role.POOL)), 0
        roles = itertools.cycle((Role.DECODE, Role.PREFILL) if with_prefill else (Role.DECODE,))
        misses = 0
        while misses < 2:  # none of either kind fits
            whole = self.whole(next(roles))
            if _fits(whole, left):
                left, num, misses = _less(left, whole), num + 1, 0
            else:
                misses += 1
        return num

    def _num(self, role: Role, left: Resources) -> int:
        """Return 1 where a worker fits, else 0."""
        return int(all(number >= 0 for number in left.values()) and _fits(self.whole(role), left))

    def _take(self, node: _NodeRoom, role: Role, names: list[str], most: int) -> None:
        while most and names and _fits(self.whole(role), node.resources):
            node.take(self.parts(role, names.pop(0)))
            most -= 1

    def _each_anywhere(self, parts: Sequence[str], role: Role, left: Sequence[_NodeRoom]) -> list[PlacedGroup]:
        needs, placed = self.whole(role), list[PlacedGroup]()
        for part in parts:
            node = next((node for node in left if _fits(needs, node.resources)), None)
            if node is None:
                raise NoPlace(f"{part} has no place: it needs {_said(needs)}; {_named(self.nodes)}")
            node.resources = _less(node.resources, needs)
            placed.append(PlacedGroup(self.parts(role, part), node.node))
        return placed


def _has_both(node: _NodeRoom) -> bool:
    roles = {name.partition("-")[0] for name in node.group}
    return roles.issuperset(role.value for role in WORKERS)


def _enough(nodes: Sequence[_NodeRoom], rooms: Sequence[int], wanted: int) -> Sequence[_NodeRoom]:
    """Return the first nodes that have room for so many workers together; all where that is too little."""
    together = list(itertools.accumulate(rooms))
    return nodes[: 1 + next((number for number, room in enumerate(together) if room >= wanted), len(nodes))]


def _shares(number: int, rooms: Sequence[int]) -> list[int]:
    """Return how many of `number` workers each node gets: one if there are enough, and the rest in proportion to its
    room. For example, 7 of rooms 4 and 4 are 4 and 3, and 2 of rooms 3 and 2 are 1 and 1."""
    each = int(number >= len(rooms))
    whole, given = sum(rooms) or 1, list[int]()
    for room in itertools.accumulate(rooms):
        given.append(-(-(number - each * len(rooms)) * room // whole) - sum(given))
    return [each + more for more in given]


def fit_one(group: Group, available: Sequence[ClusterNode]) -> bool:
    """Return whether a node has room for the whole group."""
    return any(_fits(_sum(group.values()), node.total) for node in available)


def waits(group: Group, available: Sequence[ClusterNode]) -> str:
    """Return a line that says why these parts wait for a place."""
    needs = _said(_sum(group.values()))
    verb = "waits" if len(group) == 1 else "wait"
    return f"{', '.join(group)} {verb} for a node with {needs} free; free are: {_each(available)}"


def _fits(needs: Resources, have: Resources) -> bool:
    return all(have.get(resource, 0.0) >= number for resource, number in needs.items())


def _less(have: Resources, taken: Resources) -> dict[str, float]:
    return {resource: have.get(resource, 0.0) - taken.get(resource, 0.0) for resource in {**have, **taken}}


def _sum(many: Iterable[Resources]) -> Resources:
    total: dict[str, float] = {}
    for resources in many:
        for resource, number in resources.items():
            total[resource] = total.get(resource, 0.0) + number
    return total


def _named(nodes: Sequence[ClusterNode]) -> str:
    return f"the cluster's nodes are: {_each(nodes)}"


def _each(nodes: Sequence[ClusterNode]) -> str:
    return "; ".join(sorted(f"{node.name} ({_said(node.total)})" for node in nodes)) or "none"


def _said(resources: Resources) -> str:
    return ", ".join(f"{name} {resources[name]:g}" for name in _SHOWN if resources.get(name)) or "nothing of use"


# --- The nodes that may come


_UNLIKE = {"memory", "object_store_memory"}  # these differ a little between machines of one type


@dataclass(frozen=True)
class NodeType:
    name: str
    resources: Resources
    most: int  # nodes of this type, at most


@dataclass(frozen=True)
class ClusterFile:
    """What the file that `ray up` was given says of nodes: types without the head's and how many of these there are at
    least, or the addresses of machines."""

    types: Sequence[NodeType] = ()
    machines: Sequence[str] = ()
    least: int = 0


def cluster_file(path: str) -> ClusterFile:
    """Read the file; raises ConfigError.

    Ray's autoscaler starts a node for a part that waits for a place. A part that fits no present node can wait for a
    new node only if it is known what new nodes have: Ray does not say, and its file does."""
    try:
        told = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"ray.cluster_file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"ray.cluster_file {path} is not YAML") from None
    try:
        types = [
            NodeType(
                name,
                {key: float(value) for key, value in (kind.get("resources") or {}).items() if key not in _UNLIKE},
                int(kind.get("max_workers", told.get("max_workers", 0))),
            )
            for name, kind in told["available_node_types"].items()
            if name != told["head_node_type"]
        ]
        machines = [*map(str, (told.get("provider") or {}).get("worker_ips") or ())]
        kinds = [kind for name, kind in told["available_node_types"].items() if name != told["head_node_type"]]
        return ClusterFile(types, machines, 0 if machines else sum(int(kind.get("min_workers", 0)) for kind in kinds))
    except (KeyError, TypeError, ValueError, AttributeError):
        missing = "has no available_node_types and head_node_type as Ray's cluster files have them"
        raise ConfigError(f"ray.cluster_file {path} {missing}") from None


def may_come(types: Sequence[NodeType], there: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return the nodes that may come beside those that are there. A type whose resources the file does not give is left
    out: it might not fit."""

    def is_of(node: ClusterNode, kind: NodeType) -> bool:
        return all(node.total.get(resource, 0.0) == number for resource, number in kind.resources.items())

    return [
        ClusterNode(f"one more {kind.name}", kind.resources)
        for kind in types
        if kind.resources
        for _ in range(kind.most - sum(is_of(node, kind) for node in there))
    ]
