"""Cores decide and do nothing else: they load few files, import without any module for IO, and read no clock."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import alignedserve
from measure_house import HERE, House

ROOT = Path(alignedserve.__file__).parent
BLOCKED = ("ray", "fastapi", "redis", "asyncio", "zmq", "torch", "uvicorn", "transformers", "numpy", "matplotlib")
CORES = (
    "alignedserve.core",
    "alignedserve.protocol.messages",
    "alignedserve.protocol.membership",
    "alignedserve.config.config",
    "alignedserve.protocol.wire",
    "alignedserve.shell.turn",
    "alignedserve.owner.core",
    "alignedserve.jobs.state",
    "alignedserve.router.state",
    "alignedserve.prefill_worker.state",
    "alignedserve.decode_worker.state",
    "alignedserve.kvpool.state",
    "alignedserve.dashboard.picture",
    "alignedserve.metrics.recent",
    "alignedserve.lab.simulator.run",
    "alignedserve.lab.loads.workload.spec",
    "alignedserve.lab.fuzzing.shrink",
    "alignedserve.cost.model",
    "alignedserve.cost.fit",
    "alignedserve.cost.profile",
    "alignedserve.lab.devices.gpu_truth",
    "alignedserve.lab.cli.simulate",
    "alignedserve.lab.bench.core",
    "alignedserve.lab.bench.page",
    "alignedserve.launch.orders",
)
# Every file of these folders belongs to a core or is used by cores, except the files in SHELL_FILES.
CORE_FOLDERS = (
    "lab/bench",
    "explain",
    "forms",
    "papers",
    "papers/memory",
    "protocol",
    "scheduling",
    "schedulers",
    "cost",
    "worker",
    "worker/step",
    "router",
    "router/placing",
    "prefill_worker",
    "decode_worker",
    "kvpool",
    "kvpool/memory",
    "dashboard",
    "lab/simulator",
    "lab/devices",
    "lab/fuzzing",
    "lab/simulator/machines",
    "lab/planning",
    "lab/loads",
    "lab/loads/figures",
    "lab/loads/records",
    "lab/reports",
    "lab/loads/workload",
)
SHELL_FILES = (
    "actor.py",
    "lab/bench/connections.py",
    "lab/bench/player.py",
    "cost/profile.py",
    "dashboard/sharing.py",
    "papers/memory/hidden.py",  # an engine's part
)
CORE_FILES = (
    ROOT / "core.py",
    ROOT / "owner" / "core.py",
    ROOT / "owner" / "explaining.py",
    ROOT / "shell" / "turn.py",
    ROOT / "launch" / "starts.py",
    *(ROOT / "jobs" / f"{name}.py" for name in "messages state shares rate window".split()),
    ROOT / "store" / "job.py",
    *(
        path
        for folder in CORE_FOLDERS
        for path in sorted((ROOT / folder).glob("*.py"))
        if not path.as_posix().endswith(SHELL_FILES)
    ),
)
CLOCKS = {"time", "datetime"}
_CLOCK = r"\b(?:import|from)\b.*\b(?:date)?time\b|\b(?:date)?time\.\w|sleep"  # a text without it reads none

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
    """The job runner speaks no HTTP: its process is smaller without a server, and starts sooner."""
    servers = "fastapi starlette uvicorn uvloop"
    command = [sys.executable, "-c", IMPORT_ALL, servers, "alignedserve.jobs.actor alignedserve.owner.shell"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr


def test_cores_read_no_clock_and_never_sleep() -> None:
    reads = {path: list(_clock_reads(_parsed(path, _CLOCK))) for path in CORE_FILES}
    assert {str(path.relative_to(ROOT)): found for path, found in reads.items() if found} == {}


def _parsed(path: Path, where: str) -> ast.AST:
    """Return the syntax tree of a file, and an empty one where the text has no match: parsing takes long."""
    text = path.read_text(encoding="utf-8")
    return ast.parse(text if re.search(where, text) else "")


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


# The most files that a core loads: all that one reads to know what it decides.
MOST_LOADED = {"alignedserve.router.state": 30, "alignedserve.decode_worker.state": 60}


def test_cores_load_few_files() -> None:
    house = House(HERE)
    loaded = {core: house.closure(core) for core in MOST_LOADED}
    assert all(core in files for core, files in loaded.items()), "a core has another name"
    assert [f"{core} loads {len(files)}" for core, files in loaded.items() if len(files) > MOST_LOADED[core]] == []
