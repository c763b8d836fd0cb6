"""Tests that the doctor says what is there and what is missing, and whether that is enough."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alignedserve.architectures import model_source
from alignedserve.cli import doctor
from alignedserve.cli.doctor import Finding, FoundKernels, FoundTorch, Presence
from alignedserve.config.choices import DeviceKind
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.kernels.dispatch.paged_attention import LONG_CHUNK
from alignedserve.kernels.dispatch.paged_libraries import PAGE
from alignedserve.kvpool.arena import numa
from alignedserve.machine import resources
from alignedserve.machine.resources import MachineMemory
from alignedserve.sizing import accelerator, memory
from alignedserve.sizing.accelerator import DeviceChoice
from tests.rare import rare

_Usage = namedtuple("_Usage", "total used free")
_REAL_VERSION = doctor._version
_KERNELS = FoundKernels(True, "C++, avx2: the best of generic, avx2 that this CPU runs", ["libgomp.so.1"])


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend that the machine can serve, whatever the real machine is like."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.setattr(model_source, "DEMO_FOLDER", tmp_path)
    monkeypatch.setattr(doctor, "_version", lambda _: "1.0")
    monkeypatch.setattr(doctor, "_try_torch", lambda _: FoundTorch("9.9", [], _KERNELS))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(1024 << 20, 0, 1024 << 20))


def _found(name: str) -> Finding:
    return next(finding for finding in doctor.findings() if finding.name == name)


def test_a_sound_machine_can_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run() == 0
    out = capsys.readouterr().out
    assert "This machine can serve" in out
    assert "MISSING" not in out
    assert "C++, avx2" in out


def test_what_weights_take(monkeypatch: pytest.MonkeyPatch) -> None:
    found = MachineMemory(10**11, 32 * 10**9, None)
    monkeypatch.setattr(resources, "memory", lambda: found)
    monkeypatch.setattr(memory, "memory", lambda: found)
    monkeypatch.setattr(memory, "claimed", lambda _: 0)
    monkeypatch.setattr(doctor, "claimed", lambda _: 0)
    assert _found("weights").what == (
        "a billion parameters take 2.0 GB in bfloat16, 14 billion fit;"
        " 1.1 GB with --quantization int8, 26 billion fit; 0.6 GB with --quantization int4, 44 billion fit"
    )
    assert _found("memory").what == (
        "30517 MB available of 95367 MB; a deployment plans with 25939: 15% stay for other programs"
    )
    monkeypatch.setattr(memory, "claimed", lambda _: 10**10)
    monkeypatch.setattr(doctor, "claimed", lambda _: 10**10)
    assert _found("memory").what.endswith(
        "with 17833: 15% stay for other programs, and running deployments may take 9536"
    )
    monkeypatch.setattr(memory, "memory", lambda: None)
    assert "fit" not in _found("weights").what


def test_how_weights_would_be_kept_and_what_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        _found("precision").what == "weights of linear layers as the model has them, all else in the model's own type"
    )
    monkeypatch.setenv("ALIGNEDSERVE_ENGINE_QUANTIZATION", "int4")
    monkeypatch.setenv("ALIGNEDSERVE_ENGINE_DTYPE", "float16")
    found = _found("precision")
    assert found.what == "weights of linear layers int4, all else in float16"
    assert "a worker's log says its own" in found.how


def test_all_that_is_installed_with_us_is_needed() -> None:
    listed = (Path(__file__).parents[2] / "pyproject.toml").read_text().partition("\ndependencies = [\n")[2]
    names = re.findall(r'^    "([\w-]+)>=', listed.partition("\n]\n")[0], re.MULTILINE)
    assert set(names) == {*doctor.NEEDED, "torch", "uvloop"}  # asyncio has an event loop of its own, too


def test_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(as_json=True) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["can_serve"] is True
    states = {finding["name"]: finding["state"] for finding in read["findings"]}
    assert states["torch"] == "found"
    assert states["gpu"] == "absent"
    assert {"python", "cores", "memory", "/dev/shm", "ray", "triton", "redis", "demo model"} <= set(states)
    assert {"flash-attn", "tokenspeed-fa3"} <= set(states)


@pytest.mark.parametrize(
    ("package", "state"),
    [
        ("torch", Presence.MISSING),
        ("tokenizers", Presence.MISSING),
        ("ray", Presence.ABSENT),
        ("triton", Presence.ABSENT),
        ("uvloop", Presence.ABSENT),
        ("tokenspeed-fa3", Presence.ABSENT),
    ],
)
def test_only_what_serving_needs_is_missing(monkeypatch: pytest.MonkeyPatch, package: str, state: Presence) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == package else "1.0")
    assert _found(package).state is state
    what = "'alignedserve[flash]'" if package == "tokenspeed-fa3" else package
    assert f"pip install {what}" in _found(package).how
    assert doctor.run() == (1 if state is Presence.MISSING else 0)


@pytest.mark.parametrize(("package", "extra"), [("transformers", "transformers"), ("redis", "redis")])
def test_what_an_extra_brings_is_named_by_it(monkeypatch: pytest.MonkeyPatch, package: str, extra: str) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == package else "1.0")
    assert _found(package).state is Presence.ABSENT
    assert _found(package).how == f"pip install 'alignedserve[{extra}]'"
    assert doctor.run() == 0


def test_a_torch_that_does_not_import_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_try_torch", lambda _: "ImportError: libcudart.so")
    assert _found("torch").state is Presence.MISSING
    assert "libcudart" in _found("torch").what


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_try_torch", lambda _: FoundTorch("9.9", ["H200, 139 GiB"] * 2, _KERNELS))
    found = _found("gpu")
    assert (found.state, found.what) == (Presence.FOUND, "H200, 139 GiB; H200, 139 GiB")


def test_the_road_of_each_pair_of_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    three = FoundTorch("9.9", ["H200, 139 GiB"] * 3, _KERNELS, sends=True, apart=[[0, 2]])
    monkeypatch.setattr(doctor, "_try_torch", lambda _: three)
    roads = "GPUs 0 and 1 ipc; GPUs 0 and 2 host; GPUs 1 and 2 ipc"
    by_default = "auto takes host where prefill workers lend, as by default"
    assert _found("transports").what == f"{by_default}, and with prefill.lends never ipc on one GPU; {roads}"


@pytest.mark.parametrize(
    ("choice", "gpus", "state", "said"),
    [
        (
            DeviceChoice(DeviceKind.CPU, "no driver of a GPU is here"),
            [],
            Presence.FOUND,
            "auto takes cpu: no driver of a GPU is here; steps of up to 64 requests and 512 tokens",
        ),
        (
            DeviceChoice(DeviceKind.CUDA, "torch sees H200"),
            ["H200, 139 GiB"],
            Presence.FOUND,
            "auto takes cuda: torch sees H200; steps of up to 256 requests and 2048 tokens",
        ),
        (
            DeviceChoice(DeviceKind.CPU, "/dev/nvidiactl is here, but torch sees no GPU: too old", is_fallback=True),
            [],
            Presence.ABSENT,
            "auto takes cpu: /dev/nvidiactl is here, but torch sees no GPU: too old; steps of up to 64 requests",
        ),
    ],
)
def test_it_says_which_device_auto_takes_and_why(
    monkeypatch: pytest.MonkeyPatch, choice: DeviceChoice, gpus: list[str], state: Presence, said: str
) -> None:
    monkeypatch.setattr(accelerator, "choose", lambda: choice)
    monkeypatch.setattr(doctor, "_try_torch", lambda _: FoundTorch("9.9", gpus, _KERNELS))
    found = _found("device")
    assert found.state is state
    assert found.what.startswith(said)
    assert bool(found.how) is choice.is_fallback
    assert doctor.run() == 0, "it serves on what there is"


def test_a_device_that_is_not_there_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_ENGINE_DEVICE", "cuda")
    found = _found("device")
    assert (found.state, found.how) == (Presence.MISSING, "torch sees no GPU: set engine.device to auto or cpu")
    assert found.what == "cuda: engine.device says so; steps of up to 256 requests and 2048 tokens"
    assert doctor.run() == 1
    monkeypatch.setenv("ALIGNEDSERVE_ENGINE_DEVICE", "cpu")
    assert _found("device").what.startswith("cpu: engine.device says so; ")


def test_others_attention_is_named_and_why_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = replace(_KERNELS, paged=["flash-attn 2.8"], lacking=["FlashAttention 3 is not installed"])
    monkeypatch.setattr(doctor, "_try_torch", lambda _: FoundTorch("9.9", [], tried))
    found = _found("GPU attention")
    assert (found.state, found.what) == (
        Presence.ABSENT,
        "flash-attn 2.8 is there; FlashAttention 3 is not installed",
    )
    assert f"read blocks of a multiple of {PAGE} tokens, where engine.block_size is 16" in found.how
    assert f"chunks of requests of {LONG_CHUNK:,} tokens, on GPUs of compute capability 9.0" in found.how
    flash_3 = replace(tried, paged=["FlashAttention 3"], lacking=[])
    monkeypatch.setattr(doctor, "_try_torch", lambda _: FoundTorch("9.9", [], flash_3))
    assert _found("GPU attention").state is Presence.FOUND, "it reads blocks of any size"
    assert "capability 9.0; ours attends otherwise" in _found("GPU attention").what
    monkeypatch.setattr(doctor, "_try_torch", lambda _: FoundTorch("9.9", [], tried))
    monkeypatch.setenv("ALIGNEDSERVE_ENGINE_BLOCK_SIZE", "256")
    assert _found("GPU attention").state is Presence.FOUND


def test_what_the_kernels_fall_back_on_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found("fallbacks") == Finding("fallbacks", Presence.FOUND, "none: all kernels for this machine work")
    fallen = [{"what": "kernel attend", "why": "ptxas fatal", "instead": "torch reference takes its place"}]
    tried = FoundTorch("9.9", ["H200, 139 GiB"], replace(_KERNELS, fallen=fallen))
    monkeypatch.setattr(doctor, "_try_torch", lambda _: tried)
    found = _found("fallback")
    assert (found.state, found.what) == (
        Presence.ABSENT,
        "kernel attend: torch reference takes its place (ptxas fatal)",
    )
    assert doctor.run() == 0


def test_shared_memory_that_is_too_small_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(64 << 20, 0, 48 << 20))
    monkeypatch.setenv("ALIGNEDSERVE_KVPOOL_MEMORY_MB", "256")
    found = _found("/dev/shm")
    assert found.state is Presence.MISSING
    assert found.what == "48 MB free of 64 MB"
    assert "--pool-memory-mb 48" in found.how
    monkeypatch.setenv("ALIGNEDSERVE_KVPOOL_MEMORY_MB", "32")
    assert _found("/dev/shm").state is Presence.FOUND


def test_it_says_what_the_pool_comes_to_where_no_size_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(1024 << 20, 0, 1000 << 20))
    found = _found("/dev/shm")
    assert found.state is Presence.FOUND
    assert "the KV pool takes half of it at most (--pool-memory-mb)" in found.what


@pytest.mark.parametrize(("free_mb", "state"), [(1, Presence.MISSING), (48, Presence.ABSENT)])
def test_a_small_shared_memory_is_found_before_anything_is_served(
    monkeypatch: pytest.MonkeyPatch, free_mb: int, state: Presence
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(64 << 20, 0, free_mb << 20))
    found = _found("/dev/shm")
    assert found.state is state
    assert "start the container with --shm-size=2g" in found.how


def test_a_wrong_variable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_SERVER_PROT", "1")
    assert "ALIGNEDSERVE_SERVER_PROT" in _found("configuration").what
    assert doctor.run() == 1


def test_a_variable_that_does_not_go_with_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "choose", lambda: DeviceChoice(DeviceKind.CPU, "no driver of a GPU is here"))
    monkeypatch.setenv("ALIGNEDSERVE_ENGINE_CUDA_GRAPHS", "on")
    found = [finding.name for finding in doctor.findings()]
    assert "engine.cuda_graphs on needs engine.device cuda" in _found("configuration").what
    assert "precision" in found
    assert "device" not in found


def test_a_missing_demo_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").unlink()
    assert "lacks model.safetensors" in _found("demo model").what
    assert doctor.run() == 1


def test_versions_are_those_of_installed_packages() -> None:
    assert _REAL_VERSION("pytest") == pytest.__version__
    assert _REAL_VERSION("no-such-package-of-ours") is None


@rare
def test_torch_is_tried_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tried = doctor._try_torch(None)
    assert isinstance(tried, FoundTorch)
    assert isinstance(tried.kernels, FoundKernels)
    chosen = choose(torch.device("cpu"), torch.bfloat16)
    assert tried.kernels.what == f"{chosen.kernels.name}: {chosen.why}"
    assert any(name.startswith("FlashAttention 3") for name in (*tried.kernels.paged, *tried.kernels.lacking))
    assert len(tried.kernels.pools) == 1, "the kernels bring no second pool of threads"
    monkeypatch.setattr(doctor, "_TRY_TORCH", "raise ImportError('no libcudart')")
    assert doctor._try_torch(None) == "ImportError: no libcudart"
    monkeypatch.setattr(doctor, "_TRY_TORCH", "import os; os._exit(3)")
    assert doctor._try_torch(None) == "exit status 3"


def test_kernels_that_end_their_process_are_missing_and_torch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_TRY_TORCH", """print('{"version": "9.9", "gpus": []}', flush=True)""")
    monkeypatch.setattr(doctor, "_TRY_KERNELS", "\nprint('{}', flush=True); import os; os._exit(4)")
    tried = doctor._try_torch(None)
    assert tried == FoundTorch("9.9", [], "exit status 4")
    monkeypatch.setattr(doctor, "_TORCH_LIMIT_S", 0)
    assert doctor._try_torch(None) == "importing it took more than 0 s"
    monkeypatch.setattr(doctor, "_try_torch", lambda _: tried)
    assert _found("torch").state is Presence.FOUND
    assert _found("kernels") == Finding("kernels", Presence.MISSING, "exit status 4", "install AlignedServe again")


@pytest.mark.parametrize("native", [True, False])
def test_it_serves_without_the_kernels_and_says_why_they_are_not_used(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    kernels = FoundKernels(native, "chosen: why", ["libgomp.so.1"])
    monkeypatch.setattr(doctor, "_try_torch", lambda _: FoundTorch("9.9", [], kernels))
    assert _found("kernels") == Finding("kernels", Presence.FOUND if native else Presence.ABSENT, "chosen: why")
    assert doctor.run() == 0


def test_a_second_pool_of_threads_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found("OpenMP").state is Presence.FOUND
    kernels = FoundKernels(True, "chosen: why", ["libgomp.so.1", "libiomp5.so"])
    monkeypatch.setattr(doctor, "_try_torch", lambda _: FoundTorch("9.9", [], kernels))
    assert _found("OpenMP").state is Presence.ABSENT
    assert "libiomp5.so" in _found("OpenMP").what


def test_the_compiler_is_the_compiler_that_building_would_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "g++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert _found("C++ compiler") == Finding("C++ compiler", Presence.FOUND, str(tmp_path / "g++"))
    monkeypatch.setenv("CXX", "/nonexistent")
    assert _found("C++ compiler").state is Presence.ABSENT
    assert "/nonexistent, which is not there" in _found("C++ compiler").what
    assert doctor.run() == 0


def test_the_numa_node_of_the_pool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "num_nodes", lambda: 2)
    monkeypatch.setattr(numa, "best_place", lambda: numa.NumaPlace(1, frozenset({0}), "the GPUs are there"))
    assert _found("NUMA").what == "2 nodes, the KV pool's memory goes to node 1: the GPUs are there"
    monkeypatch.setattr(numa, "best_place", lambda: None)
    assert _found("NUMA").state is Presence.ABSENT
    monkeypatch.setattr(numa, "num_nodes", lambda: 1)
    assert _found("NUMA").state is Presence.FOUND
