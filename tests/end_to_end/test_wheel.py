"""Tests that a wheel built from the repository serves the demo model elsewhere, with a compiler and without."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from alignedserve.kernels.build import X86, NoCompiler, find_compiler
from tests.conftest import SOAK
from tests.end_to_end.deployment import ANSWER_S, NAME, deployed
from tests.rare import rare, thinned

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://git.example.org/us/alignedserve"
BUILD_S = 900.0  # the compiler takes most of it, on cores that other processes use too


@dataclass(frozen=True)
class Installed:
    """A wheel, and its content unpacked into a folder that holds nothing else."""

    wheel: Path
    folder: Path
    compiled: bool
    path: str  # directories where programs are searched

    @property
    def package(self) -> Path:
        return self.folder / "alignedserve"


def _compiles() -> bool:
    try:
        return bool(find_compiler())
    except NoCompiler:
        return False


# tests/kernels/test_build.py compiles.
@pytest.fixture(scope="module", params=thinned(["no compiler", "compiler"], usual=1))
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    with_compiler = request.param == "compiler"
    if with_compiler and not _compiles():
        pytest.skip("this machine has no C++ compiler")
    tmp = tmp_path_factory.mktemp("wheel")
    # Leave out earlier builds, and all that a build would write into the repository.
    left_out = shutil.ignore_patterns(".*", "build", "*.so", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, tmp / "source", symlinks=True, ignore=left_out)
    (tmp / "empty").mkdir()
    path = os.environ["PATH"] if with_compiler else str(tmp / "empty")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PATH": path,
        "CPU_KERNELS": "all",
        "RELEASED_FROM": REPOSITORY,
    }
    if not with_compiler:
        env.pop("CXX", None)
    elif not SOAK:
        env["CXX"] = str(_old_compiler(tmp / "old-c++"))
    _pip(env, "wheel", "--no-build-isolation", "--wheel-dir", tmp / "wheels", tmp / "source")
    (wheel,) = (tmp / "wheels").iterdir()
    zipfile.ZipFile(wheel).extractall(tmp / "site")  # all that an installation does with it
    shutil.rmtree(tmp / "source")
    yield Installed(wheel, tmp / "site", with_compiler, path)
    shutil.rmtree(tmp)


_OLD_LEVELS = ("generic",)


def _old_compiler(made: Path) -> Path:
    """Make a compiler that knows one instruction set of six and optimises nothing: a full build takes minutes.

    All six are compiled before any test, in the repository."""
    compiler = shlex.join(find_compiler())
    made.write_text(f'#!/bin/sh\ncase "$*" in *avx*) exit 1;; esac\nexec {compiler} "$@" -O0\n')
    made.chmod(0o755)
    return made


def _pip(env: dict[str, str], command: str, *arguments: str | Path) -> None:
    quietly = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-cache-dir")
    run = [sys.executable, "-m", "pip", command, *quietly, *map(str, arguments)]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def elsewhere(installed: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installed:
    """Run as a user without a repository: an empty directory, and the package from the wheel."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(installed.folder))
    monkeypatch.setenv("PATH", installed.path)
    monkeypatch.delenv("CXX", raising=False)
    return installed


def test_it_is_for_any_python_of_this_system_and_holds_what_serving_needs(installed: Installed) -> None:
    assert "-py3-none-" in installed.wheel.name
    assert installed.wheel.name.endswith(f"_{platform.machine()}.whl")
    held = zipfile.ZipFile(installed.wheel).namelist()
    sources = [f"alignedserve/kernels/csrc/{source.name}" for source in (ROOT / "kernels" / "csrc").iterdir()]
    modules = [
        path for path in glob("alignedserve/**/*.py", root_dir=ROOT, recursive=True) if "benchmarks/" not in path
    ]
    profiles = [f"alignedserve/lab/devices/profiles/{path.name}" for path in _profiles()]
    assert {*sources, *modules, *profiles, "alignedserve/demo_model/model.safetensors"} <= set(held)
    assert profiles
    assert ("alignedserve/kernels/libalignedserve_kernels.so" in held) == installed.compiled
    assert not [name for name in held if not name.startswith("alignedserve")], "nothing else lands in site-packages"


def test_its_kernels_are_for_every_level_that_its_compiler_knows(installed: Installed) -> None:
    """A soak test's compiler is the machine's own, which knows all of them."""
    if not installed.compiled or platform.machine() != "x86_64":
        pytest.skip("it has no kernels, or not those of x86")
    library = (installed.package / "kernels" / "libalignedserve_kernels.so").read_bytes()
    found = [level for level in X86 if f"{len(level)}{level}6kernel".encode() in library]  # names of functions
    assert found == [level for level in X86 if SOAK or level in _OLD_LEVELS]


def test_its_kernels_need_nothing_but_what_every_linux_has(installed: Installed) -> None:
    """auditwheel names the oldest system that it runs on, or `linux` where it needs a library of this machine."""
    if not installed.compiled:
        pytest.skip("it has no kernels")
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(installed.wheel)]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert shown["overall_tag"].startswith("manylinux_2_")


def test_its_metadata_has_licence_version_and_changelog(installed: Installed) -> None:
    (folder,) = installed.folder.glob("alignedserve-*.dist-info")
    metadata = (folder / "METADATA").read_text(encoding="utf-8")
    assert {path.name for path in (folder / "licenses").iterdir()} == {"LICENSE", "NOTICE"}
    assert f"\nVersion: {version('alignedserve')}\n" in metadata
    assert f"[architecture]({REPOSITORY}/blob/main/docs/architecture.md" in metadata.lower()
    assert "\n# Changes\n" in metadata
    assert re.findall(r"\]\((?!https?:|#)", metadata) == [], "an index has no file beside its page"
    for told in (
        "Author: The AlignedServe authors",
        "Keywords: ",
        "Classifier: ",
        f"Project-URL: Source, {REPOSITORY}",
    ):
        assert f"\n{told}" in metadata
    assert {"py.typed", "__init__.pyi"} <= {path.name for path in installed.package.iterdir()}


def _profiles() -> list[Path]:
    return [path for path in (ROOT / "lab" / "devices" / "profiles").iterdir() if path.is_file()]


@rare  # the test below finds the same model and kernels; tests/cli has the doctor
def test_the_doctor_names_its_kernels(elsewhere: Installed) -> None:
    command = [sys.executable, "-m", "alignedserve", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    found = {finding["name"]: finding["what"] for finding in json.loads(done.stdout)["findings"]}
    assert found["demo model"] == str(elsewhere.package / "demo_model")
    if elsewhere.compiled:
        assert found["kernels"].startswith("C++, ")
    else:
        assert found["kernels"].startswith("torch reference: ")
        assert found["kernels"].endswith("install a C++ compiler and AlignedServe again")


@rare  # the first test finds all that is imported, and test_fallbacks.py serves without kernels
def test_it_serves_and_says_once_what_computes(elsewhere: Installed) -> None:
    with deployed(model=elsewhere.package / "demo_model") as deployment:
        body = {"model": NAME, "messages": [{"role": "user", "content": "Count from 3 to 6."}], "max_tokens": 24}
        answer = httpx.post(f"{deployment.url}/v1/chat/completions", json=body, timeout=ANSWER_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        said = [line for line in deployment.whole_log().splitlines() if ": kernels: " in line]
    assert len(said) == 1
    assert ("kernels: C++, " if elsewhere.compiled else "kernels: torch reference (") in said[0]
    assert elsewhere.compiled or "install a C++ compiler" in said[0]
