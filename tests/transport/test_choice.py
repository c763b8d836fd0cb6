"""Tests of which transport is used, and of the error where a transport cannot be used."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from alignedserve.config.choices import Launcher, TransportName
from alignedserve.config.config import Config, dump, load
from alignedserve.config.sections import EngineConfig, PoolConfig, RayConfig
from alignedserve.config.topology import Topology
from alignedserve.core import Role
from alignedserve.engine.device.pace import CopyPace
from alignedserve.errors import ConfigError, TransportError
from alignedserve.fallbacks import fallbacks
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.link_keys import DeploymentKeys
from alignedserve.shell.part import Part, PartSpec
from alignedserve.transport.opening import Means, choose, chosen_for, means_of, open_transport
from alignedserve.transport.transport import Transport

ALL = Means("cpu", None, None)


@pytest.mark.parametrize(
    ("asked", "means", "name"),
    [
        (TransportName.AUTO, ALL, TransportName.HOST),
        (TransportName.HOST, ALL, TransportName.HOST),
        (TransportName.COLLECTIVE, ALL, TransportName.COLLECTIVE),
        (TransportName.IPC, ALL, TransportName.IPC),
        (TransportName.AUTO, Means("cuda", "no NCCL", "no"), TransportName.HOST),
        (TransportName.AUTO, Means("cuda", None, "no"), TransportName.COLLECTIVE),
        (TransportName.AUTO, Means("cuda", None, None), TransportName.IPC),
    ],
)
def test_what_is_asked_for_is_used_where_it_can_be(asked: TransportName, means: Means, name: TransportName) -> None:
    assert choose(asked, means).name is name


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
        choose(asked, means_of(torch.device("cpu"), Config()))
    assert "\n" not in str(raised.value)
    assert "use auto or host" in str(raised.value)


class Gpus:
    """Makes torch report this many GPUs, which all reach each other, or none does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, reach: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reach)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


def on_gpus(**kwargs: object) -> Means:
    config = Config(**({"topology": Topology(1, 1)} | kwargs))  # type: ignore[arg-type]
    return means_of(torch.device("cuda"), config)


@pytest.mark.parametrize(
    ("count", "reach", "topology", "name", "why"),
    [
        (1, True, Topology(1, 1), TransportName.IPC, "all workers are on one GPU"),
        (2, True, Topology(1, 1), TransportName.COLLECTIVE, "each worker has a GPU"),
        (2, False, Topology(1, 1), TransportName.HOST, "GPU 0 does not reach the memory of GPU 1"),
        (2, True, Topology(2, 1), TransportName.HOST, "NCCL refuses two processes on one GPU, and 3 worker processes"),
    ],
)
def test_auto_on_gpus_is_what_reaches_the_other_s_memory(
    monkeypatch: pytest.MonkeyPatch, count: int, reach: bool, topology: Topology, name: TransportName, why: str
) -> None:
    Gpus(monkeypatch, count, reach)
    chosen = choose(TransportName.AUTO, on_gpus(topology=topology))
    assert chosen.name is name
    assert why in chosen.why


def test_what_cannot_be_on_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 2)
    with pytest.raises(TransportError, match="ipc cannot be used here: ipc is for processes on one GPU, and there"):
        choose(TransportName.IPC, on_gpus())
    assert choose(TransportName.COLLECTIVE, on_gpus()).name is TransportName.COLLECTIVE
    with pytest.raises(TransportError, match=r"collective cannot be used here: NCCL refuses .* 4 worker processes"):
        choose(TransportName.COLLECTIVE, on_gpus(topology=Topology(2, 2)))
    on_ray = {"launcher": Launcher.RAY, "transport": TransportName.COLLECTIVE}
    Gpus(monkeypatch, 1)
    each = EngineConfig(kv_memory_mb=1024)
    whole, half = (on_gpus(**on_ray, engine=each, ray=RayConfig("auto", gpus)) for gpus in (1.0, 0.5))
    assert choose(TransportName.COLLECTIVE, whole).name is TransportName.COLLECTIVE
    assert choose(TransportName.AUTO, whole).name is TransportName.HOST
    with pytest.raises(TransportError, match="Ray may put two workers on one GPU"):
        choose(TransportName.COLLECTIVE, half)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(TransportError, match="collective cannot be used here: this torch was built without NCCL"):
        choose(TransportName.COLLECTIVE, on_gpus(**on_ray, ray=RayConfig("auto", 1.0)))


@pytest.mark.parametrize("name", ["collective", "ipc"])
def test_without_prefill_workers_there_is_nobody_to_send_to(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"transport {name} is between prefill and decode workers: topology colocated"
    ):
        load({"transport": name}, {}, None)
    assert load({"transport": name, "topology": "1+1"}, {}, None).transport is TransportName(name)


def part(incarnation: int = 7, **kwargs: object) -> Part:
    config = Config(**({"topology": Topology(1, 1)} | kwargs))  # type: ignore[arg-type]
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
        worker_part = part(transport=TransportName(name), kvpool=pool)
        transport, cache = opened(worker_part)
        assert transport.address.startswith("127.0.0.1:") is is_direct
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
    chosen_for(part(transport=asked), torch.device(device))
    assert [fallback.what for fallback in fallbacks()] == ["KV from GPU to GPU"] * falls_back
