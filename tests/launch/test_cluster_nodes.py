"""Tests of the launcher's part of the preflight, and of the table of what is used and what is not."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from alignedserve.config.config import Config, load
from alignedserve.errors import AlignedServeError
from alignedserve.launch import cluster, nodes
from alignedserve.launch.nodes import ClusterNodes
from alignedserve.launch.placing import NoPlace
from alignedserve.launch.preflight import Asked, Finding, GpuOffer, NodeReport, Presence

GIB = 1 << 30
H100 = GpuOffer(4, "NVIDIA H100", 80 * GIB, 3.35e12, "NVLink")
OLD = Finding("driver", Presence.MISSING, "driver 570.1 runs CUDA 12", "install driver 580 or newer")
NO_GCC = Finding("C compiler", Presence.ABSENT, "no C compiler (gcc)", "apt-get install gcc")


class FakeRay(MagicMock):
    """Nodes n0, n1, ...; n0 is the head, on which the launcher runs. Each tells its report as JSON."""

    def __init__(self, *told: tuple[Mapping[str, float], NodeReport | None], **more: Any) -> None:
        super().__init__(**more)
        self.told = {f"n{number}": each for number, each in enumerate(told)}
        self.util.get_node_ip_address.return_value = "127.0.0.1"
        self.get_runtime_context.return_value.get_node_id.return_value = "n0"
        self.util.scheduling_strategies.NodeAffinitySchedulingStrategy = lambda node, **_: node
        self.asked = list[dict[str, Any]]()

    def _get_child_mock(self, **more: Any) -> MagicMock:
        return MagicMock(**more)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "NodeID": name, "NodeManagerAddress": name, "Resources": resources}
            for name, (resources, _) in self.told.items()
        ]

    def remote(self, **_: object) -> Any:
        def run(on: str) -> Any:
            def ask(text: str) -> str:
                self.asked.append(json.loads(text))
                return on

            return MagicMock(remote=ask)

        return lambda _: MagicMock(options=lambda scheduling_strategy: run(scheduling_strategy))

    def get(self, run: str, timeout: float) -> str:
        report = self.told[run][1]
        if report is None:
            raise TimeoutError
        return report.to_json()


def looked(ray: FakeRay, **more: Any) -> ClusterNodes:
    found = ClusterNodes(ray, Asked.of(Config(model="demo")), **more)
    found.look()
    return found


def sound(gpus: GpuOffer = H100, *findings: Finding, now: float = 0.0) -> NodeReport:
    return NodeReport(findings, gpus, now=now)


GPUS = {"CPU": 64.0, "GPU": 4.0}


def test_each_fault_is_a_line_with_its_node_and_a_node_that_cannot_serve_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ray = FakeRay((GPUS, sound(H100, OLD)), (GPUS, sound(H100, NO_GCC)), (GPUS, None))
    found = looked(ray)
    assert capsys.readouterr().err.splitlines() == [
        "alignedserve: fault: n0: driver 570.1 runs CUDA 12: install driver 580 or newer",
        "alignedserve: fault: n1: no C compiler (gcc): apt-get install gcc",
        "alignedserve: fault: n2: it does not look at itself within 15 s (TimeoutError): see ~/alignedserve/ray.log"
        " there, and that it has the same AlignedServe and Python",
    ]
    assert [node.name for node in found.there()] == ["n1"]
    assert found.left_out == {"n0", "n2"}
    found.look()
    assert len(ray.asked) == 3, "each looks once"


def test_a_clock_that_is_ahead_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    found = looked(FakeRay((GPUS, sound(now=time.time() + 60))))
    assert "fault: n0: its clock is 60 s ahead: keep clocks together" in capsys.readouterr().err
    assert found.there(), "it serves all the same"


def test_a_machine_that_is_not_there_is_waited_for_where_it_answers_to_ssh(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as ssh:
        monkeypatch.setattr(nodes, "_SSH", ssh.getsockname()[1])
        found = looked(FakeRay((GPUS, sound())), expected=["127.0.0.1", "127.0.0.2"])
        assert found.awaited() == ["127.0.0.1"]
        assert found.awaited() == ["127.0.0.1"]
    said = capsys.readouterr().err
    assert said.count("fault: 127.0.0.2: it cannot be reached by SSH from the head (") == 1


def asked(**settings: object) -> Config:
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    return load({"launcher": "ray", "ray.address": "auto", "model": "demo", "topology": "auto", **flags}, {}, None)


DEMO = Path(cluster.__file__).parents[1] / "demo_model"


def decided(ray: FakeRay, **more: Any) -> tuple[Config, dict[str, list[str]], list[str]]:
    """Return the config, the parts of each node, and the table without the line of roads."""
    found = ClusterNodes(ray, Asked.of(Config(model="demo")), **more)
    config, placed = cluster._wait_for_nodes(asked(), found, DEMO)
    at = {part: node.id for group, node in placed for part in group}
    *table, roads = found.table(config, at, ["router", "gateway-0"])
    assert roads.startswith("roads of KV: ")
    return config, {node.id: [*group] for group, node in placed}, table


def test_a_head_with_gpus_and_a_node_are_used_whole() -> None:
    config, at, table = decided(FakeRay(({"CPU": 4.0, "GPU": 4.0}, sound()), (GPUS, sound())))
    assert str(config.topology) == "8xcolocated"
    assert {node: len(parts) for node, parts in at.items()} == {"n0": 5, "n1": 5}
    assert table == [
        "node n0: decode-0..3, gateway-0, pool-0, router; 4 x NVIDIA H100",
        "node n1: decode-4..7, pool-1; 4 x NVIDIA H100",
    ]


def test_what_is_not_used_is_named_with_its_reason() -> None:
    ray = FakeRay(({"CPU": 0.0, "GPU": 4.0}, sound()), (GPUS, sound()), (GPUS, sound(H100, OLD)))
    config, at, table = decided(ray)
    assert str(config.topology) == "4xcolocated"
    assert [*at] == ["n1"]
    assert [line for line in table if line.startswith("not used")] == [
        "not used: 4 of the 4 GPUs of n0: Ray was started there without CPUs, and each rank needs one: `ray start "
        "--num-cpus`, one a GPU",
        "not used: 4 of the 4 GPUs of n2: driver 570.1 runs CUDA 12: install driver 580 or newer",
    ]


@pytest.mark.parametrize(
    ("settings", "table"),
    [
        ({"topology": "1+3"}, "not used: 4 of the 4 GPUs of n1: topology 1+3 has no more workers that fit there"),
        ({"engine__device": "cpu", "topology": "1+1"}, "not used: 4 of the 4 GPUs of n1: workers compute on the CPU ("),
    ],
)
def test_what_a_pinned_topology_leaves_is_named(settings: dict[str, str], table: str) -> None:
    ray = FakeRay((GPUS, sound()), (GPUS, sound()))
    found = ClusterNodes(ray, Asked.of(Config(model="demo")))
    config, placed = cluster._wait_for_nodes(asked(**settings), found, DEMO)
    at = {part: node.id for group, node in placed for part in group}
    lines = [*found.table(config, at, ["router"])]
    assert any(line.startswith(table) for line in lines), lines
    assert lines[-1].startswith("roads of KV: the KV pool of each node, in the host's memory (GPUs have NVLink")


def test_where_all_nodes_have_faults_it_ends_at_once() -> None:
    began_at = time.monotonic()
    with pytest.raises(NoPlace, match="nodes with a fault are left out"):
        decided(FakeRay(({"CPU": 0.0}, sound(GpuOffer())), (GPUS, sound(H100, OLD))))
    assert time.monotonic() - began_at < 5.0


def test_the_launchers_own_errors_name_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "import_ray", lambda: FakeRay((GPUS, sound())))
    for part in ("_join", "BoundedEnd"):
        monkeypatch.setattr(cluster, part, MagicMock())
    with pytest.raises(AlignedServeError, match="no-such is neither a folder nor a hub id"):
        cluster.serve_on_cluster(asked(model="no-such"), MagicMock())
