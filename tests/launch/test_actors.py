"""What the host on Ray does with a part that waits for its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest

from alignedserve.config.config import load
from alignedserve.launch.actors import Actors
from alignedserve.launch.host import PartEnded
from alignedserve.launch.nodes import ClusterNodes
from alignedserve.launch.preflight import Asked, NodeReport
from tests.launch.keepers import specs_of


@pytest.mark.parametrize("has_lived", [False, True])
def test_a_part_that_waits_for_its_place_can_be_ended(has_lived: bool) -> None:
    """A worker that is retired then would never end, as no actor reports its end."""
    config = load({"topology": "1+1", "launcher": "ray", "ray.address": "auto"}, {}, None)
    [spec] = [spec for spec in specs_of(config) if spec.name == "decode-0"]
    ray: Any = MagicMock()
    ray.nodes.return_value = [{"Alive": True, "NodeID": "n", "NodeManagerAddress": "n", "Resources": {"CPU": 8.0}}]
    full: dict[str, dict[str, float]] = {"n": {}}
    ray._private.state.available_resources_per_node.return_value = full
    ray.util.placement_group.return_value.wait.return_value = False
    ray.util.get_node_ip_address.return_value = "127.0.0.1"
    ray.get.return_value = NodeReport(()).to_json()
    host = Actors(ray, config, "test", [], nodes=ClusterNodes(ray, Asked.of(config)))
    host._reserve({"pool-0": {"CPU": 0.0}})
    assert host.make_place("decode-0").lacks, "it waits beside the pool"
    if has_lived:
        host._actors["decode-0"] = MagicMock()
    host.start(replace(spec, incarnation=2))
    host.end("decode-0")
    assert host.events.next() == PartEnded("decode-0", 2, "no place", "")
    host.forget("decode-0")
