"""The doctor says what is there and what is missing, and whether that is enough."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from alignedserve import doctor, model_source
from alignedserve.doctor import Finding, State

_Usage = namedtuple("_Usage", "total used free")
_REAL_VERSION = doctor._version


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that can serve, whatever the one that runs the test is like."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.setattr(model_source, "DEMO_FOLDER", tmp_path)
    monkeypatch.setattr(doctor, "_version", lambda _: "1.0")
    monkeypatch.setattr(doctor, "_try_torch", lambda: ("9.9", []))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(1024 << 20, 0, 1024 << 20))


def _found(name: str) -> Finding:
    return next(one for one in doctor.findings() if one.name == name)


def test_a_sound_machine_can_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run() == 0
    out = capsys.readouterr().out
    assert "This machine can serve" in out
    assert "MISSING" not in out
    assert "torch reference" in out


def test_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(as_json=True) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["can_serve"] is True
    states = {one["name"]: one["state"] for one in read["findings"]}
    assert states["torch"] == "found"
    assert states["gpu"] == "absent"
    assert {"python", "cores", "memory", "/dev/shm", "ray", "triton", "flash-attn", "redis", "demo model"} <= set(
        states
    )


@pytest.mark.parametrize(
    ("package", "state"),
    [("torch", State.MISSING), ("tokenizers", State.MISSING), ("ray", State.ABSENT), ("triton", State.ABSENT)],
)
def test_only_what_serving_needs_is_missing(monkeypatch: pytest.MonkeyPatch, package: str, state: State) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == package else "1.0")
    assert _found(package).state is state
    assert f"pip install {package}" in _found(package).how
    assert doctor.run() == (1 if state is State.MISSING else 0)


def test_a_torch_that_does_not_import_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_try_torch", lambda: "ImportError: libcudart.so")
    assert _found("torch").state is State.MISSING
    assert "libcudart" in _found("torch").what


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_try_torch", lambda: ("9.9", ["H200, 139 GiB", "H200, 139 GiB"]))
    assert _found("gpu") == Finding("gpu", State.FOUND, "H200, 139 GiB; H200, 139 GiB")


def test_shared_memory_that_is_too_small_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(64 << 20, 0, 48 << 20))
    found = _found("/dev/shm")
    assert found.state is State.MISSING
    assert found.what == "48 MB free of 64 MB"
    assert "--pool-memory-mb 48" in found.how
    monkeypatch.setenv("ALIGNEDSERVE_KVPOOL_MEMORY_MB", "32")
    assert _found("/dev/shm").state is State.FOUND


def test_a_wrong_variable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_SERVER_PROT", "1")
    assert "ALIGNEDSERVE_SERVER_PROT" in _found("configuration").what
    assert doctor.run() == 1


def test_a_missing_demo_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").unlink()
    assert "lacks model.safetensors" in _found("demo model").what
    assert doctor.run() == 1


def test_a_container_s_quota_limits_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cgroup_limits", lambda _: iter(["max 100000", "50000 100000", "", "odd"]))
    assert doctor.usable_cores() == 0.5


def test_limits_are_read_from_the_own_group_to_the_outermost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("200000 100000\n")
    read = doctor._text
    monkeypatch.setattr(doctor, "_CGROUPS", tmp_path)
    monkeypatch.setattr(doctor, "_text", lambda path: "0::/a/b\n" if path == Path("/proc/self/cgroup") else read(path))
    assert list(doctor._cgroup_limits("cpu.max")) == ["200000 100000", "", "max 100000"]


def test_versions_are_those_of_installed_packages() -> None:
    assert _REAL_VERSION("pytest") == pytest.__version__
    assert _REAL_VERSION("no-such-package-of-ours") is None


def test_torch_is_tried_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tried = doctor._try_torch()
    assert not isinstance(tried, str)
    monkeypatch.setattr(doctor, "_TRY_TORCH", "raise ImportError('no libcudart')")
    assert doctor._try_torch() == "ImportError: no libcudart"
    monkeypatch.setattr(doctor, "_TRY_TORCH", "import os; os._exit(3)")
    assert doctor._try_torch() == "exit status 3"
