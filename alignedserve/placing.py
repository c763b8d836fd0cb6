"""Which nodes of a cluster have room for which parts, and in words why there is none.

The router and the gateway run where the deployment was started: users and parts know their addresses. Workers that
share a pool share the memory of its node, so they are placed together; colocated ones go wherever there is room.
Nodes may say what they are for by resources that are named after roles (`ray start --resources '{"decode": 8}'`); a
role that no node names runs anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alignedserve.core import Role
from alignedserve.errors import AlignedServeError

NAMED = {Role.POOL: "kv_pool", Role.PREFILL: "prefill", Role.DECODE: "decode"}
WORKERS = (Role.PREFILL, Role.DECODE)
_SHOWN = ("CPU", "GPU", *NAMED.values())

Resources = Mapping[str, float]


class NoPlace(AlignedServeError):
    """The cluster has no room for the deployment."""


@dataclass(frozen=True)
class Node:
    name: str
    total: Resources


@dataclass(frozen=True)
class Needs:
    """Of parts that are placed on nodes of their own choosing: name of the part -> its resources."""

    of: Mapping[str, Resources]
    together: bool

    @classmethod
    def made(cls, parts: Sequence[tuple[Role, str]], nodes: Sequence[Node], gpus_per_worker: float) -> Needs:
        offered = {resource for node in nodes for resource in node.total}

        def of(role: Role) -> Resources:
            named = {NAMED[role]: 1.0} if NAMED[role] in offered else {}
            gpus = {"GPU": gpus_per_worker} if role in WORKERS and gpus_per_worker else {}
            return {"CPU": float(role in WORKERS), **gpus, **named}  # a pool only says which pages are whose

        placed = {name: of(role) for role, name in parts if role in NAMED}
        return cls(placed, together=any(role is Role.POOL for role, _ in parts))

    def check(self, nodes: Sequence[Node]) -> None:
        """Raises NoPlace where they have no room even while nothing else runs there."""
        if self.together:
            whole = _sum(self.of.values())
            if not any(_fits(whole, node.total) for node in nodes):
                what = f"{', '.join(self.of)} share the memory of one node"
                raise NoPlace(f"{what}, which has to have {_said(whole)}; {_all(nodes)}")
            return
        left = [dict(node.total) for node in nodes]
        for part, needs in self.of.items():
            at = next((at for at, have in enumerate(left) if _fits(needs, have)), None)
            if at is None:
                raise NoPlace(f"{part} has no place: it needs {_said(needs)}; {_all(nodes)}")
            left[at] = {resource: number - needs.get(resource, 0.0) for resource, number in left[at].items()}


def waits(part: str, needs: Resources, available: Sequence[Node]) -> str:
    """Why a part that had a place has none now."""
    return f"{part} waits for a node with {_said(needs)} free; free are: {_each(available)}"


def _fits(needs: Resources, have: Resources) -> bool:
    return all(have.get(resource, 0.0) >= number for resource, number in needs.items())


def _sum(many: Iterable[Resources]) -> Resources:
    total: dict[str, float] = {}
    for one in many:
        for resource, number in one.items():
            total[resource] = total.get(resource, 0.0) + number
    return total


def _all(nodes: Sequence[Node]) -> str:
    return f"the cluster's nodes are: {_each(nodes)}"


def _each(nodes: Sequence[Node]) -> str:
    return "; ".join(sorted(f"{node.name} ({_said(node.total)})" for node in nodes)) or "none"


def _said(resources: Resources) -> str:
    return ", ".join(f"{name} {resources[name]:g}" for name in _SHOWN if resources.get(name)) or "nothing of use"
