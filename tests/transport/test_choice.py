"""Which transport is used, and what is said where it cannot be."""

from __future__ import annotations

import logging

import pytest
import torch

from alignedserve.config import Config, TransportName, dump, load
from alignedserve.core import Role
from alignedserve.engine.pace import Pace
from alignedserve.errors import ConfigError, TransportError
from alignedserve.parts import Part, PartSpec
from alignedserve.topology import Topology
from alignedserve.transport.choice import Means, choose, means_of
from alignedserve.transport.opening import open_transport

ALL = Means("cpu", None, None)


@pytest.mark.parametrize(
    ("asked", "means", "name"),
    [
        (TransportName.AUTO, ALL, TransportName.HOST),
        (TransportName.HOST, ALL, TransportName.HOST),
        (TransportName.COLLECTIVE, ALL, TransportName.COLLECTIVE),
        (TransportName.IPC, ALL, TransportName.IPC),
        (TransportName.AUTO, Means("cuda", "no NCCL", "no"), TransportName.HOST),
    ],
)
def test_what_is_asked_for_is_used_where_it_can_be(asked: TransportName, means: Means, name: TransportName) -> None:
    assert choose(asked, means).name is name


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (TransportName.IPC, "ipc cannot be used here: it maps the memory of a GPU, and this worker's KV is on the CPU"),
        (TransportName.COLLECTIVE, "collective cannot be used here: this torch was built without torch.distributed"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, asked: TransportName, said: str
) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(TransportError, match=said) as raised:
        choose(asked, means_of(torch.device("cpu")))
    assert "\n" not in str(raised.value)
    assert "auto and host can" in str(raised.value)


def test_on_a_gpu_neither_groups_nor_maps_are_there_yet() -> None:
    means = means_of(torch.device("cuda"))
    assert (means.no_collective, means.no_ipc) == (
        "groups for KV on cuda (NCCL) are not there yet",
        "this version maps no GPU's memory yet",
    )


@pytest.mark.parametrize("name", ["collective", "ipc"])
def test_without_prefill_workers_there_is_nobody_to_send_to(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"transport {name} is between prefill and decode workers: topology colocated"
    ):
        load({"transport": name}, {}, None)
    assert load({"transport": name, "topology": "1+1"}, {}, None).transport is TransportName(name)


def part(**kwargs: object) -> Part:
    config = Config(**({"topology": Topology(1, 1)} | kwargs))  # type: ignore[arg-type]
    spec = PartSpec(Role.PREFILL, "prefill-0", "local", "test", "127.0.0.1", "tcp://127.0.0.1:9", dump(config), 7)
    return Part(spec)


def test_a_worker_opens_it_as_it_starts_and_says_which(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("alignedserve").propagate = True
    caplog.set_level(logging.INFO)
    cache = torch.zeros(2, 8, 4, 8)
    for name, said in (("collective", "collective (asked for)"), ("auto", "host (KV is in the memory of the CPU")):
        one = part(transport=TransportName(name))
        transport = open_transport(one, cache, None, Pace())
        assert transport.address.startswith("127.0.0.1:") is (name == "collective")
        assert f"transport: {said}" in caplog.messages[-1]
        transport.close()
        one.links.close()
    one = part(topology=Topology())
    assert open_transport(one, cache, None, Pace()).address == "", "nobody to send to"
    one.links.close()
