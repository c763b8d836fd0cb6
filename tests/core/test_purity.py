"""Cores decide and do nothing else: they import without what does IO, and read no clock."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import alignedserve

ROOT = Path(alignedserve.__file__).parent
BLOCKED = ("ray", "fastapi", "redis", "asyncio", "zmq", "torch", "uvicorn", "transformers", "numpy", "matplotlib")
CORES = (
    "alignedserve.core",
    "alignedserve.messages",
    "alignedserve.membership",
    "alignedserve.config",
    "alignedserve.wire",
    "alignedserve.owner",
    "alignedserve.jobs.state",
    "alignedserve.router.state",
    "alignedserve.prefill_worker.state",
    "alignedserve.decode_worker.state",
    "alignedserve.kvpool.state",
    "alignedserve.simulator.run",
    "alignedserve.simulator.workload.spec",
    "alignedserve.simulator.shrink",
    "alignedserve.cost",
    "alignedserve.cost_fit",
    "alignedserve.cost_profile",
    "alignedserve.simulator.gpu_truth",
    "alignedserve.simulate_command",
)
# Of the folders whose other files are cores; what is below them, router/side, is a shell.
SHELL_FILES = ("actor.py", "arena.py", "shared_files.py")
CORE_FILES = (
    *(
        ROOT / f"{name}.py"
        for name in (
            "core messages events commands membership owner outputs running wire worker in_flight notes slo policy "
            "promise cost cost_fit cost_trials levels lengths sketch leases page_writer compressing step_room sums"
        ).split()
    ),
    *(
        path
        for folder in ("router", "prefill_worker", "decode_worker", "kvpool")
        for path in sorted((ROOT / folder).glob("*.py"))
        if path.name not in SHELL_FILES
    ),
    *(ROOT / "jobs" / f"{name}.py" for name in "job exchange state shares rate window".split()),
    *sorted((ROOT / "simulator").rglob("*.py")),
)
CLOCKS = {"time", "datetime"}

IMPORT_ALL = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")

blocked, cores = sys.argv[1].split(), sys.argv[2].split()
sys.meta_path.insert(0, Blocked())
for core in cores:
    importlib.import_module(core)
"""


def test_cores_import_without_what_does_io() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, " ".join(BLOCKED), " ".join(CORES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr


def test_the_job_runner_imports_no_http_server() -> None:
    """It speaks no HTTP: its process is smaller without, and starts sooner."""
    servers = "fastapi starlette uvicorn uvloop"
    command = [sys.executable, "-c", IMPORT_ALL, servers, "alignedserve.jobs.actor alignedserve.owner_shell"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_cores_read_no_clock_and_never_sleep(path: Path) -> None:
    assert list(_clock_reads(ast.parse(path.read_text()))) == []


def _clock_reads(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (name.name for name in names if name.name in CLOCKS)
            case ast.ImportFrom(module=str(module)) if module in CLOCKS:
                yield module
            case ast.Call(ast.Attribute(ast.Name(name), attribute)) if name in CLOCKS or attribute == "sleep":
                yield f"{name}.{attribute}"
            case ast.Call(ast.Name("sleep")):
                yield "sleep"


def test_the_check_sees_a_clock() -> None:
    seen = list(_clock_reads(ast.parse("import time\nfrom time import sleep\ntime.time()\nsleep(1)")))
    assert seen == ["time", "time", "time.time", "sleep"]
