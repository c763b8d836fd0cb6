"""Tests of `topology: auto`: which workers nodes and GPUs give, and that all of them find a place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alignedserve.architectures.families.model_config import read_config
from alignedserve.config.config import Config, load
from alignedserve.core import Role
from alignedserve.launch.placing import ClusterNode, Placing
from alignedserve.launch.plan import plan
from alignedserve.launch.preflight import GpuOffer
from alignedserve.launch.roles import NodeOffer, choose
from tests.sizing.published import write

GIB = 1 << 30
H100 = GpuOffer(4, "NVIDIA H100", 80 * GIB, 3.35e12, "NVLink")
RTX_4090 = GpuOffer(2, "NVIDIA GeForce RTX 4090", 24 * GIB, 1.008e12, "PCIe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(name, tmp_path_factory.mktemp(name)) for name in ("Llama-3.1-8B", "Llama-3.1-70B")}


def asked(folder: Path, device: str = "cuda", **settings: object) -> Config:
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    usual = {"topology": "auto", "model": str(folder), "engine.load_format": "dummy", "engine.device": device}
    return load({**usual, **flags}, {}, None)


def chosen(config: Config, *nodes: NodeOffer) -> tuple[str, int, str]:
    folder = Path(config.model)
    config, lines = choose(config, nodes, read_config(folder), folder)
    assert len(lines) == 3
    topology, ranks = str(config.topology), config.engine.tensor_parallel_size
    assert lines[2] == f"to pin this: topology: {topology}, engine.tensor_parallel_size: {ranks}"
    return topology, ranks, lines[0]


def node(gpu: GpuOffer = H100, cpus: float = 64.0, **named: int) -> NodeOffer:
    return NodeOffer("n", cpus, gpu.number, gpu, {Role(role): number for role, number in named.items()})


def test_without_a_promise_each_gpu_runs_prompts_and_decodes(folders: dict[str, Path]) -> None:
    topology, ranks, why = chosen(asked(folders["Llama-3.1-8B"]), node(), node())
    assert (topology, ranks) == ("8xcolocated", 1)
    assert why.endswith("since no gap between tokens was promised (slo.tbt_ms)")
    assert chosen(asked(folders["Llama-3.1-8B"]), node(), node(GpuOffer()))[0] == "4xcolocated", "a head without GPUs"


@pytest.mark.parametrize(("tbt_ms", "topology"), [(25, "4+4"), (50, "8xcolocated")])
def test_a_tight_promise_parts_prompts_from_decodes(folders: dict[str, Path], tbt_ms: float, topology: str) -> None:
    found, _, why = chosen(asked(folders["Llama-3.1-8B"], slo__tbt_ms=tbt_ms), node(), node())
    assert found == topology
    assert f"steps of decodes take about 13 of the {tbt_ms} ms of slo.tbt_ms" in why


def test_a_model_gets_as_many_gpus_as_it_needs(folders: dict[str, Path]) -> None:
    assert chosen(asked(folders["Llama-3.1-70B"]), node(), node())[:2] == ("4xcolocated", 2)
    assert chosen(asked(folders["Llama-3.1-8B"]), node(RTX_4090))[:2] == ("2xcolocated", 1)
    long = asked(folders["Llama-3.1-8B"], engine__max_model_len=100_000)
    assert chosen(long, node(RTX_4090))[:2] == ("colocated", 2), "one context of this length has to fit"
    pinned = asked(folders["Llama-3.1-8B"], engine__tensor_parallel_size=4)
    assert chosen(pinned, node(), node())[:2] == ("2xcolocated", 4)


def test_resources_that_name_roles_are_kept_to(folders: dict[str, Path]) -> None:
    topology, _, why = chosen(asked(folders["Llama-3.1-8B"]), node(prefill=1, decode=3), node(prefill=1, decode=3))
    assert (topology, why) == ("2+6", "topology: 2+6: the nodes' resources name these roles")


def test_on_cpus_each_node_has_a_worker(folders: dict[str, Path]) -> None:
    none = GpuOffer()
    config = asked(folders["Llama-3.1-8B"], device="cpu")
    assert chosen(config, node(none, cpus=0.0), node(none), node(none))[0] == "2xcolocated"
    assert chosen(asked(folders["Llama-3.1-8B"], "cpu", transport="collective"), node(none), node(none))[0] == "1+1"


def test_what_is_pinned_is_not_chosen(folders: dict[str, Path]) -> None:
    config = asked(folders["Llama-3.1-8B"], topology="1+1")
    assert choose(config, [node()], read_config(folders["Llama-3.1-8B"]), folders["Llama-3.1-8B"]) == (config, ())


def test_on_one_machine_the_plan_has_what_was_chosen(tmp_path: Path) -> None:
    given = {"topology": "auto", "model": "demo", "engine.device": "cpu", "kvpool.directory": str(tmp_path)}
    planned = plan(load({**given, "jobs.store": "off"}, {}, None))
    for claim in planned.claims:
        claim.close()
    assert str(planned.config.topology) == "colocated"
    assert planned.sizes[1] == "each worker: the cores of its node: no GPU is used"


@example([2, 3], True)  # two prefill workers were on the larger node
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.booleans())
def test_all_that_are_chosen_have_a_place_and_no_gpu_is_left(numbers: list[int], is_tight: bool) -> None:
    demo = load({"topology": "auto", "engine.device": "cuda", "slo.tbt_ms": 1e-3 if is_tight else None}, {}, None)
    folder = Path(__file__).parents[2] / "alignedserve" / "demo_model"
    offers = [node(GpuOffer(number, "GPU", 80 * GIB, 1e12)) for number in numbers]
    config, _ = choose(demo, offers, read_config(folder), folder)
    topology = config.topology
    assert topology.prefill_workers + topology.decode_workers == sum(numbers)
    nodes = [ClusterNode(str(at), {"CPU": 64.0, "GPU": float(number)}) for at, number in enumerate(numbers)]
    named = [
        [f"{role}-{number}" for number in range(count)]
        for role, count in (("prefill", topology.prefill_workers), ("decode", topology.decode_workers))
    ]
    placed = Placing(nodes, 1.0, may_travel=topology.colocated).placed(*named)
    assert sum(part.startswith(("prefill", "decode")) for group, _ in placed for part in group) == sum(numbers)
