"""Cores decide and do nothing else: they import without any module for IO, and read no clock."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import alignedserve

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
    "forms/memory",
    "forms/pool",
    "papers",
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
SHELL_FILES = ("actor.py", "lab/bench/connections.py", "lab/bench/player.py", "cost/profile.py", "dashboard/sharing.py")
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


# The wall clock may step by hours. It is read for what users see, and for what outlives the processes: windows of jobs,
# files that expire, the lease of their store. All else goes by the steady clock (alignedserve/shell/clock.py).
WALL_CLOCK = {
    "cli/remote/batch.py": "the time of day at which a job ends",
    "engine/profiling.py": "the date of a profile",
    "gateway/app.py": "`created` of the models",
    "gateway/access/budgets.py": "days and months of budgets",
    "gateway/batches.py": "windows of jobs",
    "gateway/files.py": "files that expire",
    "gateway/responses/keeping.py": "responses that expire, windows of jobs",
    "gateway/openai/shapes.py": "`created` of answers",
    "gateway/responding.py": "`created_at` of responses",
    "gateway/responses/answer.py": "`completed_at` of responses",
    "gateway/vectors.py": "`created` of answers",
    "jobs/answering.py": "`created_at` of responses",
    "jobs/actor.py": "windows of jobs, files that expire",
    "shell/clock.py": "once, as a launcher or a part on another machine starts",
    "store/redis_store.py": "jobs that are kept for a time",
    "store/sqlite_store.py": "the lease: those who share it may be on other machines",
    "store/storage.py": "files that were begun long ago",
    "text/chat_template.py": "the date in a prompt",
}
_WALL = {"time": {"time", "time_ns", "localtime", "gmtime"}, "datetime": {"now", "utcnow", "today"}, "date": {"today"}}


def _wall_clock_reads(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(name), attribute) if attribute in _WALL.get(name, ()):
                yield f"{name}.{attribute}"
            case ast.ImportFrom(module="time", names=names):
                yield from (f"time.{name.name}" for name in names if name.name in _WALL["time"])


def test_only_these_files_read_the_wall_clock() -> None:
    folders = (ROOT, *(path for path in ROOT.iterdir() if path.is_symlink()))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    reads = [path for path in files if list(_wall_clock_reads(_parsed(path, r"time\.\w|from time|date\.\w")))]
    assert {path.relative_to(ROOT).as_posix() for path in reads} == set(WALL_CLOCK)


def test_the_check_sees_the_wall_clock() -> None:
    told = "import time\nfrom time import time_ns\nclock = time.time\ndatetime.now()\ntime.monotonic()"
    assert sorted(_wall_clock_reads(ast.parse(told))) == ["datetime.now", "time.time", "time.time_ns"]


def test_the_check_sees_a_clock() -> None:
    seen = list(_clock_reads(ast.parse("import time\nfrom time import sleep\ntime.time()\nsleep(1)")))
    assert seen == ["time", "time", "time.time", "sleep"]
