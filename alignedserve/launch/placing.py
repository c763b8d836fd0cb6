"""Choose the nodes of a cluster for all parts, or say in words why they do not fit.

The router and the gateway run where the deployment was started: users and parts know their addresses. All other parts
are in groups, each on one node: workers that share a pool share the memory of its node, and a decode worker gets a
prefill worker beside it as long as there are some. The ranks of a worker are on one node. If one node has room for
all, they are one group. If none has, and KV may travel (`transport: collective`), or need not (colocated), groups with
a pool take as few nodes as have room for the decode workers, and the other prefill workers go anywhere. Colocated
workers go without pools where nodes are not said to have one each. If the present nodes have no room, nodes that may
come count, too.

Nodes may say what they are for by resources that are named after roles (`ray start --resources '{"decode": 8}'`); a
role that no node names runs anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

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


@dataclass
class _NodeRoom:
    """The resources that a node has left while parts are placed there."""

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
        at_most_one = all(node.total.get(NAMED[Role.POOL], 0.0) <= 1 for node in self._all)
        return self.may_travel and at_most_one and bool(self.needs(Role.POOL).get(NAMED[Role.POOL]))

    def has_node_for(self, role: Role) -> bool:
        """Return whether a node, there or to come, offers in all what one rank of a worker needs."""
        return any(_fits(self.needs(role), node.total) for node in self._all)

    @property
    def _all(self) -> Sequence[ClusterNode]:
        return (*self.nodes, *self.may_come)

    def groups(self, prefill: Sequence[str], decode: Sequence[str]) -> list[Group]:
        """Return groups of these workers and of pools for them; raises NoPlace if the nodes have too little room even
        when nothing else runs there."""
        try:
            return self._groups(prefill, decode)
        except NoPlace:
            if not self.may_come:
                raise
            return replace(self, nodes=self._all, may_come=())._groups(prefill, decode)

    def _groups(self, prefill: Sequence[str], decode: Sequence[str]) -> list[Group]:
        whole = {"pool-0": self.needs(Role.POOL)}
        for role, names in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for name in names:
                whole |= self.parts(role, name)
        if any(_fits(_sum(whole.values()), node.total) for node in self.nodes):
            return [whole]
        if not prefill and not self.has_pools:
            return self._each_anywhere(decode, Role.DECODE, [_NodeRoom(dict(node.total)) for node in self.nodes])
        if not self.may_travel:
            what = f"{', '.join(whole)} share the memory of one node, which has to have {_said(_sum(whole.values()))}"
            raise NoPlace(f"{what}, or `transport: collective`, by which they may share several; {_named(self.nodes)}")
        return self._spread(list(prefill), list(decode))

    def _spread(self, prefill: list[str], decode: list[str]) -> list[Group]:
        if not self.has_pools:
            raise NoPlace(
                "no node has room for all, and a node has one pool: nodes that may have one are to be started "
                f"with the resource `kv_pool` 1; {_named(self.nodes)}"
            )
        is_colocated = not prefill
        left = [_NodeRoom(dict(node.total)) for node in self.nodes]
        left.sort(key=lambda node: -self._num_decode(node.resources))  # stable
        for number, node in enumerate(left):
            if not decode or not self._num_decode(node.resources):
                break
            node.take({f"pool-{number}": self.needs(Role.POOL)})
            if prefill and _fits(_sum((self.whole(Role.PREFILL), self.whole(Role.DECODE))), node.resources):
                node.take(self.parts(Role.PREFILL, prefill.pop(0)))
            while decode and _fits(self.whole(Role.DECODE), node.resources):
                node.take(self.parts(Role.DECODE, decode.pop(0)))
        if decode and not is_colocated:
            needs = _sum((self.needs(Role.POOL), self.whole(Role.DECODE)))
            raise NoPlace(f"{decode[0]} has no place: with a pool it needs {_said(needs)}; {_named(self.nodes)}")
        for node in [node for node in left if node.group]:
            while prefill and _fits(self.whole(Role.PREFILL), node.resources):
                node.take(self.parts(Role.PREFILL, prefill.pop(0)))
        with_pools: list[Group] = [node.group for node in left if node.group]
        if is_colocated:  # those that have no place beside a pool do without
            return [*with_pools, *self._each_anywhere(decode, Role.DECODE, left)]
        return [*with_pools, *self._each_anywhere(prefill, Role.PREFILL, left)]

    def _num_decode(self, resources: Resources) -> int:
        """Return how many decode workers fit there beside a pool."""
        left, num = _less(resources, self.needs(Role.POOL)), 0
        if any(number < 0 for number in left.values()):
            return 0
        while _fits(self.whole(Role.DECODE), left):
            left, num = _less(left, self.whole(Role.DECODE)), num + 1
        return num

    def _each_anywhere(self, parts: Sequence[str], role: Role, left: Sequence[_NodeRoom]) -> list[Group]:
        needs = self.whole(role)
        for part in parts:
            node = next((node for node in left if _fits(needs, node.resources)), None)
            if node is None:
                raise NoPlace(f"{part} has no place: it needs {_said(needs)}; {_named(self.nodes)}")
            node.resources = _less(node.resources, needs)
        return [self.parts(role, part) for part in parts]


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


def node_types(path: str) -> list[NodeType]:
    """Return the node types in the file that `ray up` was given, without the head's; raises ConfigError.

    Ray's autoscaler starts a node for a part that waits for a place. A part that fits no present node can wait for a
    new node only if it is known what new nodes have: Ray does not say, and its file does."""
    try:
        told = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"ray.cluster_file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"ray.cluster_file {path} is not YAML") from None
    try:
        return [
            NodeType(
                name,
                {key: float(value) for key, value in (kind.get("resources") or {}).items() if key not in _UNLIKE},
                int(kind.get("max_workers", told.get("max_workers", 0))),
            )
            for name, kind in told["available_node_types"].items()
            if name != told["head_node_type"]
        ]
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
