"""`make` with locks of small wheels in a folder, without a network: a file that is not what its lock says stops CI."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKEND = """
import zipfile


def build_editable(folder, *_):
    with zipfile.ZipFile(f"{folder}/ours-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("ours-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: ours\\nVersion: 1\\n")
        wheel.writestr("ours-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("ours-1.dist-info/RECORD", "")
    return "ours-1-py3-none-any.whl"


def get_requires_for_build_editable(*_):
    return []


build_wheel = build_editable
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "ours"
version = "1"
optional-dependencies = {dev = []}
"""


def wheel(folder: Path, name: str, version: str) -> str:
    """Write a wheel with one module; return the line of a lock that wants this file."""
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = '{version}'\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)
        archive.writestr(f"{about}/RECORD", "".join(f"{m},{_digest(t)},{len(t)}\n" for m, t in files.items()))
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with our Makefile and tools/install.py, whose locks want small wheels beside it."""
    locks, wheels = tmp_path / "deploy" / "locks", tmp_path / "wheels"
    for folder in (locks, wheels, tmp_path / "tools"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "tools" / "install.py", tmp_path / "tools")
    (tmp_path / "setup.py").touch()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "backend.py").write_text(BACKEND)
    (locks / "torch-cpu.txt").write_text(wheel(wheels, "torch", "2.13.0+cpu"))
    (locks / "torch-cuda.txt").write_text("torch==2.13.0 \\\n    --hash=sha256:" + "0" * 64 + "\n")
    (locks / "serve.txt").write_text(wheel(wheels, "first", "1.0"))
    (locks / "dev.txt").write_text(wheel(wheels, "first", "1.0") + wheel(wheels, "second", "1.0"))
    (locks / "build.txt").write_text("uv==1 \\\n    --hash=sha256:" + "0" * 64 + "\n")
    return tmp_path


def made(project: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `make` up to the environment of the tests, where pip and uv are given the folder of wheels alone."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project / "wheels")}
    around = {**kept, **pip, "UV_CACHE_DIR": str(project / "cache"), **environment}
    command = ["make", f"PYTHON={sys.executable}", ".venv/testing"]
    return subprocess.run(command, cwd=project, env=around, capture_output=True, text=True, check=False)


def spoil(lock: Path) -> None:
    """Change one digit of the lock's last hash."""
    text = lock.read_text()
    lock.write_text(text[:-2] + ("0" if text[-2] != "0" else "1") + "\n")


def installed(project: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in (project / ".venv" / "lib").glob("*/site-packages/*.dist-info")}


def test_one_changed_digit_stops_all_who_do_not_say_otherwise(project: Path) -> None:
    lock = project / "deploy" / "locks" / "dev.txt"
    right = lock.read_text()
    spoil(lock)
    for environment in ({}, {"LOCKED": "1", "UNLOCKED": "1"}):
        done = made(project, **environment)
        assert done.returncode != 0
        assert "only with UNLOCKED=1" in done.stderr
        assert not (project / ".venv" / "testing").exists()
        assert "second" not in installed(project)
    done = made(project, UNLOCKED="1")
    assert done.returncode == 0, done.stderr
    assert "deploy/locks/dev.txt did not install: the newest" in done.stderr
    lock.write_text(right)
    done = made(project, LOCKED="1")
    assert done.returncode == 0, done.stderr
    assert {"torch", "first", "second", "ours"} <= installed(project)


@pytest.mark.rare
@pytest.mark.parametrize("lock", ["serve.txt", "torch-cpu.txt"])
def test_a_changed_digit_of_other_locks_stops_ci_too(project: Path, lock: str) -> None:
    spoil(project / "deploy" / "locks" / lock)
    done = made(project, LOCKED="1")
    assert done.returncode != 0
    assert "did not install" in done.stderr
    assert not (project / ".venv" / "serving").exists()


def test_ci_installs_by_the_locks_alone() -> None:
    assert re.search(r"^export LOCKED=1\b", (ROOT / ".ci" / "run").read_text(), re.M)
