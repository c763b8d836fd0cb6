"""What this machine has for serving and what it lacks, with how to get it.

Looks without importing: torch is tried in a process of its own, so that a broken one is a finding, not a crash.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from alignedserve import model_source
from alignedserve.config import load, settings
from alignedserve.errors import ConfigError

_NEEDED = (
    *("tokenizers", "safetensors", "jinja2", "huggingface_hub", "msgpack", "pyzmq", "fastapi", "pydantic", "anyio"),
    *("uvicorn", "prometheus-client", "httpx", "pyyaml"),
)
_DEMO_FILES = ("config.json", "tokenizer.json", "model.safetensors")
_TORCH_LIMIT_S = 120
_MB = 1 << 20
_SHM = Path("/dev/shm")
_CGROUPS = Path("/sys/fs/cgroup")

# In a process of its own: importing torch takes seconds, and may fail in ways that end a process.
_TRY_TORCH = """
import json, torch
cuda = torch.cuda
gpus = [cuda.get_device_properties(i) for i in range(cuda.device_count())] if cuda.is_available() else []
print(json.dumps([torch.__version__, [f"{gpu.name}, {gpu.total_memory >> 30} GiB" for gpu in gpus]]))
"""


class State(str, Enum):
    FOUND = "found"
    ABSENT = "absent"  # it serves without
    MISSING = "missing"  # it cannot serve without


@dataclass(frozen=True)
class Finding:
    name: str
    state: State
    what: str
    how: str = ""  # to get it, or to go without


def run(as_json: bool = False) -> int:
    """Prints all findings. 0 where this machine can serve."""
    found = list(findings())
    serves = all(one.state is not State.MISSING for one in found)
    if as_json:
        print(json.dumps({"can_serve": serves, "findings": [asdict(one) for one in found]}, indent=2))
    else:
        _print(found, serves)
    return 0 if serves else 1


def _print(found: list[Finding], serves: bool) -> None:
    marks = {State.FOUND: "ok", State.ABSENT: "-", State.MISSING: "MISSING"}
    for one in found:
        print(f"{marks[one.state]:8}{one.name:18}{one.what}")
        if one.how:
            print(f"{'':26}{one.how}")
    print("This machine can serve: try `alignedserve serve`." if serves else "This machine cannot serve yet.")


def findings() -> Iterator[Finding]:
    yield _python()
    yield Finding("cores", State.FOUND, f"{usable_cores():g} that this process may use, {os.cpu_count()} in all")
    yield _memory()
    yield _shared_memory()
    yield from _torch()
    for name in _NEEDED:
        yield _package(name)
    yield Finding("attention kernel", State.FOUND, "torch reference")
    yield _option("triton", "not used yet")
    yield _option("flash-attn", "not used yet")
    yield _option("ray", "for --ray")
    yield _redis_server()
    yield _option("redis", "not used yet")
    yield _demo_model()


def _python() -> Finding:
    return Finding("python", State.FOUND, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def usable_cores() -> float:
    """What affinity and the container's quota leave of the machine's cores."""
    if hasattr(os, "sched_getaffinity"):
        cores: float = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for text in _cgroup_limits("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
    return cores


def _cgroup_limits(name: str) -> Iterator[str]:
    """Such a file's text, from the process's own control group up to the outermost one that it sees."""
    own = next((line[3:] for line in _text(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")), "/")
    group = _CGROUPS / own.strip("/")
    for folder in (group, *group.parents):
        if folder == _CGROUPS or _CGROUPS in folder.parents:
            yield _text(folder / name).strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not this kind of system, or not for this user: then nothing is limited
        return ""


def _memory() -> Finding:
    lines = (line.split() for line in _text(Path("/proc/meminfo")).splitlines())
    sizes = {line[0].rstrip(":"): int(line[1]) >> 10 for line in lines if len(line) > 1}
    if "MemAvailable" not in sizes:
        return Finding("memory", State.ABSENT, "unknown: this system has no /proc/meminfo")
    limits = [int(text) // _MB for text in _cgroup_limits("memory.max") if text.isdigit()]
    limited = f", limited to {min(limits)} MB" if limits else ""
    return Finding("memory", State.FOUND, f"{sizes['MemAvailable']} MB available of {sizes['MemTotal']} MB{limited}")


def _shared_memory() -> Finding:
    flag = settings()["kvpool.memory_mb"].flags[0]
    try:
        wanted = load({}, os.environ, None).kvpool.memory_mb
        usage = shutil.disk_usage(_SHM)
    except ConfigError as error:
        return Finding("configuration", State.MISSING, str(error), "correct or unset the environment variable")
    except OSError:
        return Finding(str(_SHM), State.MISSING, "not there", "the KV pool lives in it: serve on Linux")
    free = usage.free // _MB
    what = f"{free} MB free of {usage.total // _MB} MB"
    if free >= wanted:
        return Finding(str(_SHM), State.FOUND, what)
    how = f"the KV pool takes {wanted} MB: start the container with a larger --shm-size"
    return Finding(str(_SHM), State.MISSING, what, how + (f", or serve with {flag} {free}" if free else ""))


def _torch() -> Iterator[Finding]:
    if _version("torch") is None:
        yield Finding("torch", State.MISSING, "not installed", "pip install torch")
        return
    tried = _try_torch()
    if isinstance(tried, str):
        yield Finding("torch", State.MISSING, f"{_version('torch')} is installed, but: {tried}", "install it anew")
        return
    torch, gpus = tried
    yield Finding("torch", State.FOUND, torch)
    if gpus:
        yield Finding("gpu", State.FOUND, "; ".join(gpus))
    else:
        yield Finding("gpu", State.ABSENT, "none that torch sees", "it serves on the CPU")


def _try_torch() -> tuple[str, list[str]] | str:
    """torch's version and the GPUs it sees, or why it does not run."""
    command = [sys.executable, "-c", _TRY_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"importing it took more than {_TORCH_LIMIT_S} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    torch, gpus = json.loads(done.stdout.splitlines()[-1])
    return torch, gpus


def _package(name: str) -> Finding:
    found = _version(name)
    if found is None:
        return Finding(name, State.MISSING, "not installed", f"pip install {name}")
    return Finding(name, State.FOUND, found)


def _option(name: str, purpose: str) -> Finding:
    found = _version(name)
    if found is None:
        return Finding(name, State.ABSENT, f"not installed ({purpose})", f"pip install {name}")
    return Finding(name, State.FOUND, f"{found} ({purpose})")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _redis_server() -> Finding:
    path = shutil.which("redis-server") or shutil.which("valkey-server")
    if path is None:
        how = "install redis-server or valkey-server with the system's package manager"
        return Finding("redis-server", State.ABSENT, "not on the path (not used yet)", how)
    return Finding("redis-server", State.FOUND, f"{path} (not used yet)")


def _demo_model() -> Finding:
    folder = model_source.DEMO_FOLDER
    lacking = [name for name in _DEMO_FILES if not (folder / name).is_file()]
    if lacking:
        how = "install AlignedServe anew, or `make demo-model` in its source tree"
        return Finding("demo model", State.MISSING, f"{folder} lacks {', '.join(lacking)}", how)
    return Finding("demo model", State.FOUND, str(folder))
