"""The locks have what the project asks for, each file by its hash."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.markers import Marker

import lock


@pytest.mark.parametrize("name", lock.EXTRAS)
def test_a_lock_has_all_that_is_asked_for(name: str) -> None:
    assert list(lock.missing(name)) == [], "run: python tools/lock.py"


def test_what_a_lock_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: (lock.LOCKS / name).read_text() for name in ("serve.txt", "image.txt")}
    monkeypatch.setattr(lock, "LOCKS", tmp_path)
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace("fastapi==", "elsewhere==").replace("redis==", "redis==0."))
    assert [wanted.partition(">")[0] for wanted in lock.missing("image.txt")] == ["fastapi", "redis"]


EVERY = sorted(path.name for path in lock.LOCKS.iterdir())


@pytest.mark.parametrize("name", EVERY)
def test_each_version_has_hashes(name: str) -> None:
    entries = lock.entries((lock.LOCKS / name).read_text())
    assert entries
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("name", ["dev.txt", "serve.txt", "image.txt"])
def test_a_lock_fits_other_pythons_than_the_one_that_made_it(name: str) -> None:
    """One hash of a package in C is that of a folder of wheels on the machine where the lock was made."""
    entries = lock.entries((lock.LOCKS / name).read_text())
    in_c = [entry for entry in entries if entry.startswith(("msgspec==", "numpy==", "pydantic-core==", "msgpack=="))]
    assert in_c
    assert [entry.split()[0] for entry in in_c if entry.count("--hash") < 10] == []


def test_torch_and_what_only_its_cuda_build_brings_have_locks_of_their_own() -> None:
    assert not {"torch", "nvidia-cublas", "triton"} & lock.locked((lock.LOCKS / "serve.txt").read_text()).keys()
    version = lock.torch().removeprefix("torch==")
    cpu, cuda = (lock.locked((lock.LOCKS / f"torch-{build}.txt").read_text()) for build in ("cpu", "cuda"))
    assert cpu == {"torch": [f"{version}+cpu"]}
    assert cuda["torch"] == [version]
    assert {"nvidia-cublas", "triton"} <= cuda.keys()


def test_what_a_gpu_s_image_adds_is_for_systems_that_have_it() -> None:
    """pip skips it elsewhere, where an image for GPUs is built without it."""
    lines = (lock.LOCKS / "image-cuda.txt").read_text().splitlines()
    entries = [line for line in lines if "==" in line.partition(";")[0]]
    assert "tokenspeed-fa3" in {entry.partition("==")[0] for entry in entries}
    for entry in entries:
        marker = Marker(entry.partition(";")[2].removesuffix("\\").strip())
        fits = [marker.evaluate({"sys_platform": "linux", "platform_machine": on}) for on in ("x86_64", "aarch64")]
        assert fits == [True, False], entry


def test_images_and_tests_have_the_same_versions() -> None:
    tested = lock.locked((lock.LOCKS / "dev.txt").read_text())
    untested = {"build.txt": {"uv"}, "image-cuda.txt": {"tokenspeed-fa3", "einops", "ninja"}}
    for name in ("serve.txt", "image.txt", *untested):
        served = lock.locked((lock.LOCKS / name).read_text())
        wrong = {package for package, versions in served.items() if versions != tested.get(package)}
        assert wrong <= untested.get(name, set())
