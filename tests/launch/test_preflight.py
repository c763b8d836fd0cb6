"""Tests of what a node says that it lacks: each fault is one line that says what is wrong and how to mend it."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cli.main import main
from alignedserve.config.config import Config
from alignedserve.launch import preflight
from alignedserve.launch.preflight import Asked, GpuOffer, NodeReport, Presence, look, look_by_json
from alignedserve.machine.gpus import Driver, Gpu, Link

GIB = 1 << 30
_Usage = namedtuple("_Usage", "total used free")
H100 = Gpu("NVIDIA H100", 80 * GIB, 3.35e12)
ASKED = Asked.of(Config(model="demo"))


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend that this is a node with two GPUs that lacks nothing."""
    monkeypatch.setattr(preflight, "driver", lambda: Driver("580.65.06", 13, (H100, H100), (Link.NVLINK,)))
    monkeypatch.setattr(preflight, "torch_is_built_for", lambda: {"cuda": "13.0"})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(64 * GIB, 0, 64 * GIB))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(preflight, "_RDMA", tmp_path / "infiniband")


def faults(asked: Asked = ASKED) -> list[str]:
    return [finding.fault for finding in look(asked).faults]


def test_a_sound_node_lacks_nothing_and_tells_its_gpus() -> None:
    report = look(ASKED)
    assert (report.faults, report.serves) == ([], True)
    assert report.gpus == GpuOffer(2, "NVIDIA H100", 80 * GIB, 3.35e12, "NVLink")
    assert NodeReport.from_json(look_by_json(json.dumps(asdict(ASKED)))).gpus == report.gpus


Plant = Callable[[pytest.MonkeyPatch], None]


def _driver(version: str, cuda: int, link: Link = Link.NVLINK) -> Plant:
    return lambda patch: patch.setattr(preflight, "driver", lambda: Driver(version, cuda, (H100, H100), (link,)))


def _shm(free: int) -> Plant:
    return lambda patch: patch.setattr(shutil, "disk_usage", lambda _: _Usage(64 << 20, 0, free))


def _no_gcc(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "which", lambda _: None)
    patch.delenv("CC", raising=False)


def _cpu_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preflight, "torch_is_built_for", dict[str, str])


@pytest.mark.parametrize(
    ("plant", "asked", "serves", "line"),
    [
        (
            _driver("570.124.06", 12),
            {},
            False,
            "driver 570.124.06 runs CUDA 12, and torch is built for CUDA 13.0, so it sees no GPU: "
            "install driver 580 or newer",
        ),
        (_cpu_torch, {}, False, "torch is built without CUDA, so it sees none of the GPUs: pip install torch "),
        (_no_gcc, {}, True, "no C compiler (gcc), so all kernels for GPUs fall back to torch, "),
        (_driver("580.65.06", 13, Link.NONE), {}, True, "some GPUs do not read each other's memory, so KV between "),
        (_shm(1 << 20), {}, False, "1 MB free of 64 MB; the KV pool takes half of it at most (--pool-memory-mb): too "),
        (_shm(48 << 20), {}, True, "48 MB free of 64 MB; the KV pool takes half of it at most (--pool-memory-mb): few"),
        (_shm(48 << 20), {"pool_mb": 256}, False, "48 MB free of 64 MB: the KV pool takes 256 MB: start the container"),
        (_shm(48 << 20), {"directory": "/nowhere", "pool_mb": 32}, True, ""),
        (lambda _: None, {"model": "/models/none"}, False, "/models/none is not here: copy it to the same path on all"),
        (lambda _: None, {"release": "9.9"}, False, "is installed, and the launcher has 9.9: install the same on all "),
        (lambda _: None, {"open_files": 1 << 40}, False, "a process may open "),
    ],
)  # fmt: skip
def test_a_fault_is_one_line(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, asked: dict[str, Any], serves: bool, line: str
) -> None:
    plant(monkeypatch)
    report = look(replace(ASKED, **asked))
    told = [finding.fault for finding in report.faults]
    assert report.serves is serves
    assert len(told) == bool(line)
    assert all(line in each and "\n" not in each for each in told)


def test_a_model_that_the_hub_does_not_give_asks_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = "the hub gives it only after you accept its terms: do so there, then set HF_TOKEN"
    monkeypatch.setattr(preflight, "why_no_access", lambda _: gated)
    monkeypatch.setattr(preflight, "fetched_bytes", lambda *_: 0)
    assert faults(replace(ASKED, model="org/gated")) == [
        f"org/gated cannot be fetched: {gated}: put a token with access into secrets/hf-token (HF_TOKEN), or name a"
        " model folder"
    ]
    monkeypatch.setattr(preflight, "fetched_bytes", lambda *_: 5)
    assert faults(replace(ASKED, model="org/gated", model_bytes=5)) == [], "it was fetched before"


def test_a_disk_that_is_too_small_for_the_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "why_no_access", lambda _: None)
    monkeypatch.setattr(preflight, "fetched_bytes", lambda *_: 0)
    (line,) = faults(replace(ASKED, model="org/large", model_bytes=141 * 10**9))
    assert "has 69 GB free, and 141 of the model are still to be fetched: free some, or set HF_HOME" in line


def test_a_node_that_does_not_reach_the_launcher_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens:
        at = f"127.0.0.1:{listens.getsockname()[1]}"
        assert faults(replace(ASKED, listens_at=at)) == []
    (line,) = faults(replace(ASKED, listens_at=at))
    assert line.startswith(f"port {at.partition(':')[2]} of the head 127.0.0.1 is not reached (")
    assert line.endswith("): let the nodes reach each other on all ports (firewall, security group)")


def test_the_doctor_of_a_node_is_for_machines_and_health_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    (file := tmp_path / "serve.yaml").write_text("model: demo\nengine: {device: cpu}\nkvpool: {memory_mb: 1}\n")
    assert main(["doctor", "--node", "--json", "--config", str(file)]) == 0
    assert NodeReport.from_json(capsys.readouterr().out).findings[0].state is Presence.FOUND
    file.write_text(f"model: {tmp_path}/none\nengine: {{device: cpu}}\n")
    assert main(["doctor", "--node", "--config", str(file)]) == 1
    assert "MISSING model" in capsys.readouterr().out
