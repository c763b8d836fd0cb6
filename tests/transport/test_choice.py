"""Tests of which transport is used, and of the error where a transport cannot be used."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignedserve.config.choices import Launcher, TransportName
from alignedserve.config.config import Config, dump, load
from alignedserve.config.sections import EngineConfig, PoolConfig, PrefillConfig, RayConfig, ScheduleConfig
from alignedserve.config.topology import Topology
from alignedserve.core import Role
from alignedserve.engine.device.pace import CopyPace
from alignedserve.errors import ConfigError, TransportError
from alignedserve.fallbacks import fallbacks
from alignedserve.protocol.roads import Endpoint
from alignedserve.scheduling.policy import Lends
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.link_keys import DeploymentKeys
from alignedserve.shell.part import Part, PartSpec
from alignedserve.transport import opening
from alignedserve.transport.opening import choose, chosen_for, open_transport, peers_of
from alignedserve.transport.transport import Transport
from alignedserve.transport.turns import communicators_on

CUDA = torch.device("cuda", 0)


def config(asked: TransportName, **kwargs: Any) -> Config:
    given: dict[str, Any] = {"topology": Topology(1, 1), "transport": asked, **kwargs}
    return Config(**given)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (TransportName.AUTO, TransportName.HOST),
        (TransportName.HOST, TransportName.HOST),
        (TransportName.COLLECTIVE, TransportName.COLLECTIVE),
        (TransportName.IPC, TransportName.IPC),
        (TransportName.DIRECT, TransportName.IPC),
    ],
)
def test_on_cpus_kv_goes_through_the_pool_unless_another_way_is_asked_for(
    asked: TransportName, name: TransportName
) -> None:
    assert choose(torch.device("cpu"), config(asked)).name is name


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (TransportName.IPC, "ipc cannot be used here: this torch was built without torch.distributed"),
        (TransportName.COLLECTIVE, "collective cannot be used here: this torch was built without torch.distributed"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, asked: TransportName, said: str
) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(TransportError, match=said) as raised:
        choose(torch.device("cpu"), config(asked))
    assert "\n" not in str(raised.value)
    assert "use auto or host" in str(raised.value)


class Gpus:
    """Makes torch see this many GPUs, which all read each other's memory, or none does; the driver tells of more."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int, reach: bool = True, hidden: dict[str, bool] | None = None
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reach)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid-{device.index}")
        )
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        monkeypatch.setattr(opening, "gpus_reached", lambda _: hidden or {})


@pytest.mark.parametrize("on_ray", [False, True])
def test_auto_on_gpus_offers_its_memory_to_all_that_read_it(monkeypatch: pytest.MonkeyPatch, on_ray: bool) -> None:
    Gpus(monkeypatch, 1)
    more = {"launcher": Launcher.RAY, "ray": RayConfig("auto", 1.0)} if on_ray else {}
    assert choose(CUDA, config(TransportName.AUTO, **more)).name is TransportName.IPC
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert choose(CUDA, config(TransportName.AUTO, **more)).name is TransportName.HOST


def test_gpus_that_this_process_does_not_see_are_peers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray shows each worker its own GPU alone."""
    Gpus(monkeypatch, 1, hidden={"far": True, "farther": False})
    assert peers_of(CUDA) == {"far": True, "farther": False}
    Gpus(monkeypatch, 2, hidden={"uuid-1": False})
    assert peers_of(CUDA) == {"uuid-1": True}


def test_two_processes_on_one_gpu_have_no_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TransportName.COLLECTIVE
    Gpus(monkeypatch, 2)
    assert choose(CUDA, config(asked)).name is asked
    four = config(asked, topology=Topology(2, 2))
    with pytest.raises(TransportError, match=r"collective cannot be used here: NCCL refuses .* 4 worker processes"):
        choose(CUDA, four)
    Gpus(monkeypatch, 1)
    each = EngineConfig(kv_memory_mb=1024)
    whole, half = (
        config(asked, launcher=Launcher.RAY, engine=each, ray=RayConfig("auto", gpus)) for gpus in (1.0, 0.5)
    )
    assert choose(CUDA, whole).name is asked
    with pytest.raises(TransportError, match="Ray may put two workers on one GPU"):
        choose(CUDA, half)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(TransportError, match="collective cannot be used here: this torch was built without NCCL"):
        choose(CUDA, whole)


def test_ranks_send_over_sockets_beside_the_communicator_of_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    ranks = config(TransportName.COLLECTIVE, engine=EngineConfig(tensor_parallel_size=2))
    assert choose(CUDA, ranks).name is TransportName.COLLECTIVE
    assert communicators_on(CUDA, ranks=2) is None
    assert communicators_on(torch.device("cpu")) is None
    assert communicators_on(CUDA) is not None


@pytest.mark.parametrize("name", ["collective", "ipc"])
def test_without_prefill_workers_there_is_nobody_to_send_to(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"transport {name} is between prefill and decode workers: topology colocated"
    ):
        load({"transport": name}, {}, None)
    assert load({"transport": name, "topology": "1+1"}, {}, None).transport is TransportName(name)


APART = ScheduleConfig(helps=False)  # prefill workers only run prompts


@pytest.mark.parametrize(
    ("transport", "schedule", "lends"),
    [
        ("auto", None, True),
        ("host", None, True),
        ("auto", APART, False),
        ("collective", None, True),
        ("direct", None, True),
    ],
)
def test_by_the_pool_go_requests_of_prefill_workers_that_decode_unless_a_direct_road_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, transport: str, schedule: ScheduleConfig | None, lends: bool
) -> None:
    Gpus(monkeypatch, 2, reach=True)
    worker_part = part(transport=TransportName(transport), schedule=schedule or ScheduleConfig())
    assert worker_part.config.lends is lends
    chosen = chosen_for(worker_part, torch.device("cuda"))
    assert chosen.why.startswith("prefill workers decode too") is (lends and transport in ("auto", "host"))
    worker_part.links.close()


def test_workers_whose_prefill_workers_never_lend_go_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 2, reach=True)
    never = part(schedule=ScheduleConfig(), prefill=PrefillConfig(lends=Lends.NEVER))
    assert not never.config.lends
    assert chosen_for(never, torch.device("cuda")).name is TransportName.IPC
    never.links.close()


def test_direct_offers_both_roads_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 2)
    on_ray = {"launcher": Launcher.RAY, "ray": RayConfig("auto", 1.0)}
    assert choose(CUDA, config(TransportName.DIRECT, **on_ray)).name is TransportName.DIRECT
    assert choose(CUDA, config(TransportName.DIRECT)).name is TransportName.IPC, "one machine needs one road"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert choose(CUDA, config(TransportName.DIRECT, **on_ray)).name is TransportName.IPC


def part(incarnation: int = 7, **kwargs: Any) -> Part:
    given: dict[str, Any] = {"topology": Topology(1, 1), "schedule": APART, **kwargs}
    config = Config(**given)
    dumped = dump(config)
    at = "local", "test", "127.0.0.1", "tcp://127.0.0.1:9"
    keys = DeploymentKeys.new().parts
    return Part(PartSpec(Role.PREFILL, "prefill-0", *at, dumped, ClockOrigin.read(), incarnation, keys))


def opened(part_of_worker: Part) -> tuple[Transport, torch.Tensor]:
    chosen = chosen_for(part_of_worker, torch.device("cpu"))
    return open_transport(part_of_worker, chosen, torch.zeros(2, 8, 4, 8), CopyPace(), None)


def test_a_worker_opens_it_as_it_starts_and_says_which(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    logging.getLogger("alignedserve").propagate = True
    caplog.set_level(logging.INFO)
    pool = PoolConfig(directory=str(tmp_path))
    for name, said, is_direct in (
        ("collective", "collective (asked for)", True),
        ("ipc", "ipc (asked for)", True),
        ("auto", "host (KV is in the memory of the CPU", False),
    ):
        worker_part = part(transport=TransportName(name), kvpool=pool, schedule=APART)
        transport, cache = opened(worker_part)
        assert transport.address.startswith("tcp://127.0.0.1:") is is_direct
        assert Endpoint.read(transport.address).device == ("cpu" if name == "ipc" else "")
        assert f"transport: {said}" in caplog.messages[-1]
        assert [path.name for path in tmp_path.iterdir()] == (["test-prefill-0.7.cache"] if name == "ipc" else [])
        assert not cache.count_nonzero()
        transport.close()
        worker_part.links.close()
    assert not list(tmp_path.iterdir())
    worker_part = part(topology=Topology())
    assert opened(worker_part)[0].address == "", "nobody to send to"
    worker_part.links.close()


@pytest.mark.parametrize(
    ("device", "reach", "asked", "falls_back"),
    [
        ("cuda", False, TransportName.AUTO, True),
        ("cuda", True, TransportName.AUTO, False),
        ("cuda", False, TransportName.HOST, False),
        ("cpu", False, TransportName.AUTO, False),
    ],
)
def test_kv_that_cannot_go_from_gpu_to_gpu_is_a_fallback_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, device: str, reach: bool, asked: TransportName, falls_back: bool
) -> None:
    Gpus(monkeypatch, 2, reach)
    chosen_for(part(transport=asked, schedule=APART), torch.device(device))
    assert [fallback.what for fallback in fallbacks()] == ["KV from GPU to GPU"] * falls_back
