"""The nodes that a cluster may get beside its present nodes: the node types in the file that `ray up` was given.

Ray's autoscaler starts a node for a part that waits for a place. A part that fits no present node can wait for a new
node only if it is known what new nodes have: Ray does not say, and its file does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alignedserve.errors import ConfigError
from alignedserve.launch.placing import ClusterNode, Resources

_UNLIKE = {"memory", "object_store_memory"}  # these differ a little between machines of one type


@dataclass(frozen=True)
class NodeType:
    name: str
    resources: Resources
    most: int  # nodes of this type, at most


def node_types(path: str) -> list[NodeType]:
    """Return the node types in the file, without the head's; raises ConfigError."""
    try:
        told = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"ray.cluster_file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"ray.cluster_file {path} is not YAML") from None
    try:
        return [
            NodeType(name, _resources(kind), int(kind.get("max_workers", told.get("max_workers", 0))))
            for name, kind in told["available_node_types"].items()
            if name != told["head_node_type"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        missing = "has no available_node_types and head_node_type as Ray's cluster files have them"
        raise ConfigError(f"ray.cluster_file {path} {missing}") from None


def _resources(kind: Mapping[str, Any]) -> Resources:
    given = kind.get("resources") or {}
    return {resource: float(number) for resource, number in given.items() if resource not in _UNLIKE}


def may_come(types: Sequence[NodeType], there: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return the nodes that may come beside those that are there. A type whose resources the file does not give is left
    out: it might not fit."""
    return [
        ClusterNode(f"one more {kind.name}", kind.resources)
        for kind in types
        if kind.resources
        for _ in range(kind.most - sum(_is_of(node, kind) for node in there))
    ]


def _is_of(node: ClusterNode, kind: NodeType) -> bool:
    return all(node.total.get(resource, 0.0) == number for resource, number in kind.resources.items())
