"""Tests that files of the working directory are never imported in place of Python's modules and ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from alignedserve.safe_path import ABOVE, code_command, module_command
from draw_folders import modules
from tests.hostile_folder import imported, make_hostile
from tests.rare import rarely

MODULE = "alignedserve.core"  # imports only the standard library
_VERSION = "import sys; print(sys.version_info[:2]); sys.exit(sys.version_info < (3, 10))"


def pythons() -> Iterator[str]:
    """Yield a Python of each version that we support and that this machine has, on its path or as pyenv keeps them."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    on_path = (shutil.which(f"python3.{minor}") for minor in range(10, 15))
    versions: set[str] = set()
    for python in (sys.executable, *filter(None, on_path), *map(str, sorted(pyenv.glob("*/bin/python3")))):
        said = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout not in versions:
            versions.add(said.stdout)
            yield python


WITH = pytest.mark.parametrize("most", [1, rarely(None)], ids=["this Python", "every Python"])


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in the folder, in which nothing but its own path leads to the package."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | environment
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_hostile(tmp_path / "hostile")


@WITH
@pytest.mark.parametrize("environment", [{}, {"PYTHONSAFEPATH": "1"}])
def test_a_child_imports_nothing_from_the_working_directory(
    folder: Path, environment: dict[str, str], most: int | None
) -> None:
    for python in islice(pythons(), most):
        done = run([python, *module_command("json.tool", "--help")[1:]], folder, **environment)
        assert (done.returncode, imported(folder)) == (0, []), done.stderr
        assert done.stdout.startswith("usage:")
        done = run([python, *module_command(MODULE)[1:]], folder, **environment)
        assert (done.returncode, imported(folder)) == (0, []), done.stderr


@WITH
def test_code_imports_nothing_from_the_working_directory(folder: Path, most: int | None) -> None:
    code = "import json, statistics, alignedserve.core as core\nprint(core.__file__)"
    for python in islice(pythons(), most):
        done = run([python, *code_command(code)[1:]], folder)
        assert (done.returncode, imported(folder)) == (0, []), done.stderr
        assert done.stdout.startswith(ABOVE)


def test_the_hostile_folder_is_hostile(folder: Path) -> None:
    assert run([sys.executable, "-c", "import json, statistics"], folder).returncode != 0
    assert imported(folder) == ["json"]


def test_a_child_runs_the_package_of_its_parent(tmp_path: Path) -> None:
    """Another copy of the package in the working directory is not taken."""
    (tmp_path / "alignedserve").mkdir()
    (tmp_path / "alignedserve" / "__init__.py").write_text("raise SystemExit(7)")
    assert run(module_command(MODULE), tmp_path).returncode == 0


@pytest.mark.parametrize(("line", "says"), [("simulate --help", "usage:"), rarely(("doctor --json", '"torch"'))])
def test_the_command_line_is_safe_where_it_is_typed(folder: Path, line: str, says: str) -> None:
    """`python -m alignedserve` puts the working directory first; `doctor` starts another process."""
    done = run([sys.executable, "-m", "alignedserve", *line.split()], folder, PYTHONPATH=ABOVE)
    assert imported(folder) == [], done.stderr
    assert "statistics" not in done.stderr
    assert says in done.stdout


def test_every_child_is_started_from_here() -> None:
    files = [path for name, path in modules().items() if not name.startswith("alignedserve.lab.")]
    starting = {path.name for path in files if "sys.executable" in path.read_text(encoding="utf-8")}
    assert starting == {"safe_path.py"}
