"""Which nodes a cluster may have beside those that are there: of the types in the file that `ray up` was given.

Ray's autoscaler starts a node for what waits for a place. What has none on any node that is there can only wait for one
if it is known what new ones have: Ray tells nobody, and its file does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alignedserve.errors import ConfigError
from alignedserve.launch.placing import Node, Resources

_UNLIKE = {"memory", "object_store_memory"}  # which machines of one type have not exactly alike


@dataclass(frozen=True)
class NodeType:
    name: str
    resources: Resources
    most: int  # nodes


def node_types(path: str) -> list[NodeType]:
    """Of nodes beside the head; raises ConfigError."""
    try:
        told = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"ray.cluster_file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"ray.cluster_file {path} is not YAML") from None
    try:
        return [
            NodeType(name, _resources(one), int(one.get("max_workers", told.get("max_workers", 0))))
            for name, one in told["available_node_types"].items()
            if name != told["head_node_type"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        missing = "has no available_node_types and head_node_type as Ray's cluster files have them"
        raise ConfigError(f"ray.cluster_file {path} {missing}") from None


def _resources(one: Mapping[str, Any]) -> Resources:
    given = one.get("resources") or {}
    return {resource: float(number) for resource, number in given.items() if resource not in _UNLIKE}


def may_come(types: Sequence[NodeType], there: Sequence[Node]) -> list[Node]:
    """Beside those that are there. Of a type whose file does not say what it has, nobody knows whether it would do."""
    return [
        Node(f"one more {kind.name}", kind.resources)
        for kind in types
        if kind.resources
        for _ in range(kind.most - sum(_is_of(node, kind) for node in there))
    ]


def _is_of(node: Node, kind: NodeType) -> bool:
    return all(node.total.get(resource, 0.0) == number for resource, number in kind.resources.items())
