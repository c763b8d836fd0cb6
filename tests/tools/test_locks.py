"""The locks have what the project asks for, each file by its hash (.ci/locks writes them)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "locks"
EVERY = sorted(path.name for path in LOCKS.iterdir())
# The extras that each lock is for. An image installs the locks beside its own, too.
EXTRAS: dict[str, Sequence[str]] = {
    "dev.txt": ["dev"],
    "serve.txt": [],
    "image.txt": ["ray", "redis"],
    "image-cuda.txt": ["flash"],
}
BESIDE = {"image.txt": ["serve.txt"], "image-cuda.txt": ["serve.txt", "image.txt"]}


def entries(name: str) -> list[str]:
    """Return the lines of each version that a lock has."""
    return re.findall(r"^\S+==.*\n(?: .*\n)*", (LOCKS / name).read_text(), re.M)


def locked(name: str) -> dict[str, list[str]]:
    """Return the versions of each package in a lock; there are several where Python versions need others."""
    found: dict[str, list[str]] = {}
    for entry in entries(name):
        package, version = entry.split()[0].split("==")
        found.setdefault(_plain(package), []).append(version)
    return found


def wanted(extras: Sequence[str]) -> Iterator[Requirement]:
    for each in map(Requirement, requires("alignedserve") or ()):
        if not any(each.marker is None or each.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        if each.name == "alignedserve":
            yield from wanted(sorted(each.extras))
        elif each.name != "torch":
            yield each


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_all_that_is_asked_for(name: str) -> None:
    versions = {package: found for lock in (name, *BESIDE.get(name, ())) for package, found in locked(lock).items()}
    missing = [
        str(each)
        for each in wanted(EXTRAS[name])
        if not any(each.specifier.contains(version) for version in versions.get(_plain(each.name), ()))
    ]
    assert missing == [], "run: make locks"


@pytest.mark.parametrize("name", EVERY)
def test_each_version_has_hashes(name: str) -> None:
    found = entries(name)
    assert found
    assert [entry for entry in found if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("name", ["dev.txt", "serve.txt", "image.txt"])
def test_a_lock_fits_other_pythons_than_the_one_that_made_it(name: str) -> None:
    """One hash of a package in C is that of a folder of wheels on the machine where the lock was made."""
    in_c = [
        entry for entry in entries(name) if entry.startswith(("msgspec==", "numpy==", "pydantic-core==", "msgpack=="))
    ]
    assert in_c
    assert [entry.split()[0] for entry in in_c if entry.count("--hash") < 10] == []


def test_torch_and_what_only_its_cuda_build_brings_have_locks_of_their_own() -> None:
    assert not {"torch", "nvidia-cublas", "triton"} & locked("serve.txt").keys()
    version = re.findall(r"^TORCH := torch==(\S+)$", (ROOT / "Makefile").read_text(), re.M)[0]
    cpu, cuda = (locked(f"torch-{build}.txt") for build in ("cpu", "cuda"))
    assert cpu == {"torch": [f"{version}+cpu"]}
    assert cuda["torch"] == [version]
    assert {"nvidia-cublas", "triton"} <= cuda.keys()


def test_what_a_gpu_s_image_adds_is_for_systems_that_have_it() -> None:
    """pip skips it elsewhere, where an image for GPUs is built without it."""
    lines = (LOCKS / "image-cuda.txt").read_text().splitlines()
    added = [line for line in lines if "==" in line.partition(";")[0]]
    assert "tokenspeed-fa3" in {entry.partition("==")[0] for entry in added}
    for entry in added:
        marker = Marker(entry.partition(";")[2].removesuffix("\\").strip())
        fits = [marker.evaluate({"sys_platform": "linux", "platform_machine": on}) for on in ("x86_64", "aarch64")]
        assert fits == [True, False], entry


def test_images_and_tests_have_the_same_versions() -> None:
    tested = locked("dev.txt")
    untested = {"build.txt": {"uv"}, "image-cuda.txt": {"tokenspeed-fa3", "einops", "ninja"}}
    for name in ("serve.txt", "image.txt", *untested):
        served = locked(name)
        wrong = {package for package, versions in served.items() if versions != tested.get(package)}
        assert wrong <= untested.get(name, set())
