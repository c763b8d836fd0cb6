"""Tests of where workers compute on a cluster whose head may have no GPU: the nodes decide."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from alignedserve.config.choices import DeviceKind
from alignedserve.config.config import Config, load
from alignedserve.launch import cluster
from alignedserve.launch.cluster import decide_by_nodes, size_by_nodes
from alignedserve.launch.nodes import ClusterNodes
from alignedserve.launch.placing import ClusterNode, NoPlace, Placing
from alignedserve.launch.preflight import Asked, NodeReport
from tests.sizing.published import write

HEAD, WITH_GPU, WITHOUT = {"CPU": 0.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0}


def on_ray(**settings: object) -> Config:
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    return load({"launcher": "ray", "ray.address": "auto", "topology": "1+1", **flags}, {}, None)


def decided(config: Config, *nodes: Mapping[str, float], coming: tuple[Mapping[str, float], ...] = ()) -> Any:
    there, more = ([ClusterNode(str(number), node) for number, node in enumerate(each)] for each in (nodes, coming))
    config = decide_by_nodes(config, Placing(there, 0.0, may_travel=False, may_come=more))
    return config.engine.device, config.ray.gpus_per_worker


ON_GPU, ON_CPU = (DeviceKind.CUDA, 1.0), (DeviceKind.CPU, 0.0)


def test_auto_is_a_gpu_where_a_node_has_one_for_a_worker() -> None:
    assert decided(on_ray(), HEAD, WITH_GPU) == ON_GPU
    assert decided(on_ray(), HEAD, WITHOUT, WITH_GPU) == ON_GPU
    assert decided(on_ray(), HEAD, coming=(WITH_GPU,)) == ON_GPU, "a node that Ray would start"
    assert decided(on_ray(), HEAD, WITHOUT) == ON_CPU
    assert decided(on_ray(), HEAD | {"GPU": 1.0}, WITHOUT) == ON_CPU, "no worker is placed on the head"
    named = {"decode": 1.0, "prefill": 1.0}
    assert decided(on_ray(), WITH_GPU, WITHOUT | named) == ON_CPU, "GPUs of nodes for other things"
    assert decided(on_ray(), WITH_GPU | named, WITHOUT) == ON_GPU


def test_what_is_given_outweighs_the_nodes() -> None:
    assert decided(on_ray(engine__device="cpu"), WITH_GPU) == ON_CPU
    assert decided(on_ray(ray__gpus_per_worker=0), WITH_GPU) == ON_CPU
    assert decided(on_ray(ray__gpus_per_worker=0.5, engine__kv_memory_mb=900), WITHOUT) == (DeviceKind.CUDA, 0.5), (
        "reserved is used"
    )
    assert decided(on_ray(engine__device="cuda"), WITHOUT) == ON_GPU, "used is reserved"


def alive(*nodes: Mapping[str, float]) -> list[dict[str, Any]]:
    named = [(f"n{number}", node) for number, node in enumerate(nodes)]
    return [{"Alive": True, "NodeManagerAddress": name, "NodeID": name, "Resources": node} for name, node in named]


def waited_for(config: Config, *nodes: Mapping[str, float]) -> Any:
    ray = MagicMock()
    ray.nodes.return_value = alive(*nodes)
    return waited(ray, config)


def waited(ray: MagicMock, config: Config) -> Any:
    """Return the config and the groups that a cluster of sound nodes gives."""
    ray.util.get_node_ip_address.return_value = "127.0.0.1"
    ray.get.return_value = NodeReport(()).to_json()
    config, placed = cluster._wait_for_nodes(config, ClusterNodes(ray, Asked.of(config)), Path())
    return config, [each.group for each in placed]


def test_workers_are_placed_with_the_gpus_that_they_compute_on(capsys: pytest.CaptureFixture[str]) -> None:
    config, [group] = waited_for(on_ray(), HEAD, WITH_GPU)
    assert config.engine.device is DeviceKind.CUDA
    assert {name: needs.get("GPU", 0.0) for name, needs in group.items()} == {
        "pool-0": 0.0,
        "prefill-0": 1.0,
        "decode-0": 1.0,
    }
    assert "workers compute on GPUs" in capsys.readouterr().err
    config, [group] = waited_for(on_ray(), HEAD, WITHOUT)
    assert config.engine.device is DeviceKind.CPU
    assert not any("GPU" in needs for needs in group.values())
    assert "workers compute on CPUs" in capsys.readouterr().err


def test_what_is_waited_for_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cluster, "LOOK_S", 0.0)
    ray = MagicMock()
    ray.nodes.side_effect = itertools.chain([alive(HEAD)] * 8, itertools.repeat(alive(HEAD, WITHOUT)))
    waited(ray, on_ray(engine__device="cpu"))
    assert capsys.readouterr().err.count("waits for nodes: ") == 1


def test_too_few_gpus_are_no_reason_to_compute_on_cpus_in_silence() -> None:
    with pytest.raises(NoPlace) as refused:
        waited_for(on_ray(ray__place_s=1e-9), HEAD, {"CPU": 8.0, "GPU": 1.0})
    assert "so one node has to have CPU 2, GPU 2, or" in str(refused.value)
    assert str(refused.value).endswith(
        "; nodes have GPUs, so each rank of a worker gets one: ray.gpus_per_worker 0.5, with"
        " engine.kv_memory_mb, lets two workers share it, and engine.device cpu takes none"
    )
    with pytest.raises(NoPlace) as refused:
        waited_for(on_ray(ray__place_s=1e-9, ray__gpus_per_worker=1), HEAD, {"CPU": 8.0, "GPU": 1.0})
    assert "ray.gpus_per_worker 0.5" not in str(refused.value), "whoever asks for GPUs knows how"


class TestSizes:
    """KV and the context are for the node that offers least; pools and threads are sized where they are."""

    GROUPS = ({"pool-0": {}, "prefill-0": {"CPU": 1.0}, "decode-0": {"CPU": 1.0}},)

    def sized(self, folder: Path, *gib: float, gpu_gib: int | None = None, **settings: object) -> Config:
        config = on_ray(model=str(write("Llama-3.2-1B", folder)), engine__load_format="dummy", **settings)
        totals = [{"CPU": 0.0, "memory": 2.0**30}, *({"CPU": 8.0, "memory": each * 2**30} for each in gib)]
        nodes = [ClusterNode(str(number), total) for number, total in enumerate(totals)]
        return size_by_nodes(config, nodes, self.GROUPS, gpu_gib and gpu_gib << 30)

    def test_the_smallest_node_decides(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config = self.sized(tmp_path, 64, 16)
        engine = config.engine
        assert (engine.max_model_len, engine.threads, config.kvpool.memory_mb) == (94_208, None, None)
        assert "alignedserve: context: 94,208 of the model's 131,072 tokens" in capsys.readouterr().err
        assert self.sized(tmp_path, 64).engine.max_model_len == 131_072

    def test_a_gpu_decides(self, tmp_path: Path) -> None:
        engine = self.sized(tmp_path, 64, gpu_gib=6, engine__device="cuda", ray__gpus_per_worker=1).engine
        assert engine.kv_memory_mb is None
        assert 50_000 < (engine.max_model_len or 0) < 100_000

    def test_too_small_an_offer_refuses_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.sized(tmp_path, 1).engine.kv_memory_mb is not None
        assert "warning: by what the nodes offer, " in capsys.readouterr().err
