"""Tests of which nodes a cluster may add to those it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.errors import ConfigError
from alignedserve.launch.placing import ClusterNode, NodeType, cluster_file, may_come

ROOT = Path(__file__).resolve().parents[2]
SERVING = {"CPU": 48.0, "GPU": 4.0}
PREFILL = {"CPU": 16.0, "GPU": 1.0, "prefill": 1.0}


def test_types_are_those_of_rays_file_but_for_the_head() -> None:
    assert cluster_file(str(ROOT / "deploy" / "cluster.aws.yaml")).types == [NodeType("serving", SERVING, 4)]


def test_as_many_may_come_as_there_are_not_yet() -> None:
    types = [NodeType("serving", SERVING, 2), NodeType("prefill", PREFILL, 1), NodeType("unknown", {}, 5)]
    there = [
        ClusterNode("10.0.0.1", {"CPU": 0.0}),
        ClusterNode("10.0.0.2", SERVING | {"memory": 9.0, "node:10.0.0.2": 1.0}),
    ]
    assert may_come(types, there) == [
        ClusterNode("one more serving", SERVING),
        ClusterNode("one more prefill", PREFILL),
    ]
    assert may_come(types, [*there, *there[1:], *there[1:]]) == [ClusterNode("one more prefill", PREFILL)]


def test_own_machines_cannot_come(tmp_path: Path) -> None:
    """For such machines Ray writes node types without resources; their addresses are told."""
    import yaml
    from ray.autoscaler._private.util import prepare_config

    whole = tmp_path / "ray_bootstrap_config.yaml"
    whole.write_text(yaml.safe_dump(prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text()))))
    told = cluster_file(str(whole))
    assert may_come(told.types, []) == []
    assert told.machines == ["10.0.0.2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is not YAML"),
        ("- 1", "has no available_node_types and head_node_type"),
        ("available_node_types: {a: 1}\nhead_node_type: b", "has no available_node_types and head_node_type"),
        ("available_node_types: {a: {max_workers: x}}\nhead_node_type: b", "has no available_node_types"),
    ],
)
def test_what_is_none_of_rays_files_is_said(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"ray.cluster_file {path} {said}"):
        cluster_file(str(path))
