"""What a node has for serving and what it lacks, looked at on the node itself in about a second.

`alignedserve doctor --node` prints it, and on a cluster the launcher has each node look before a part is placed there
(nodes.py). CHECKS is the table: a row looks at one thing, and says what is there or what is missing and how to mend it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from alignedserve.architectures.model_source import cache_directory, fetched_bytes, is_fetched, is_hub_id, why_no_access
from alignedserve.config.choices import DeviceKind
from alignedserve.config.config import Config, settings
from alignedserve.machine.gpus import Driver, Link, driver
from alignedserve.machine.resources import allow_open_files
from alignedserve.sizing.accelerator import NVIDIA, torch_is_built_for
from alignedserve.sizing.memory import SHARED_RECORDS

_MB, _GB = 1 << 20, 10**9
_SMALL_SHM = 512 * _MB
_REACH_S = 3.0  # for a connection to the launcher
_LEAST_DRIVER = {12: "525", 13: "580"}  # for a major version of CUDA, as NVIDIA's table has it
_RDMA = Path("/sys/class/infiniband")


class Presence(str, Enum):
    FOUND = "found"
    ABSENT = "absent"  # the machine serves without it
    MISSING = "missing"  # the machine cannot serve without it


@dataclass(frozen=True)
class Finding:
    name: str
    state: Presence
    what: str
    how: str = ""  # to get it, or to go without

    @property
    def fault(self) -> str:
        return f"{self.what}: {self.how}"


@dataclass(frozen=True)
class Asked:
    """What a node is to be good for."""

    model: str
    cache: str | None = None  # the folder for what a start learnt
    device: str = DeviceKind.AUTO.value
    directory: str = "/dev/shm"  # of the KV pool
    pool_mb: int | None = None
    open_files: int = 0
    model_bytes: int = 0  # on the launcher's node; 0 where it is not there yet
    release: str = ""  # of the launcher
    listens_at: str = ""  # HOST:PORT of the launcher, while nodes look

    @classmethod
    def of(cls, config: Config, open_files: int = 0, release: str = "") -> Asked:
        return cls(
            *(config.model, config.cache_directory, config.engine.device.value),
            *(config.kvpool.directory, config.kvpool.memory_mb, open_files),
            release=release,
        )


@dataclass(frozen=True)
class GpuOffer:
    """The GPUs of a node."""

    number: int = 0
    name: str = ""
    total_bytes: int | None = None  # of the smallest; None where its driver does not tell
    bandwidth: float = 0.0  # of its memory, in bytes a second; 0 where nobody tells
    link: str = ""  # the slowest between two of them


NO_GPUS = GpuOffer()


@dataclass(frozen=True)
class NodeReport:
    findings: tuple[Finding, ...]
    gpus: GpuOffer = NO_GPUS
    rdma: tuple[str, ...] = ()  # its devices
    now: float = 0.0  # by its clock

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.state is not Presence.FOUND]

    @property
    def serves(self) -> bool:
        return all(finding.state is not Presence.MISSING for finding in self.findings)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeReport:
        told = json.loads(text)
        findings = tuple(Finding(**{**each, "state": Presence(each["state"])}) for each in told["findings"])
        return cls(findings, GpuOffer(**told["gpus"]), tuple(told["rdma"]), told["now"])


def visible_gpus() -> GpuOffer:
    """Return the GPUs of this machine."""
    return _offer(driver())


def _offer(found: Driver | None) -> GpuOffer:
    if found is None or not found.gpus:
        return NO_GPUS
    order = list(Link)
    least = min((size for gpu in found.gpus if (size := gpu.total_bytes) is not None), default=None)
    link = max(found.links, key=order.index).value if found.links else ""
    return GpuOffer(len(found.gpus), found.gpus[0].name, least, min(gpu.bandwidth for gpu in found.gpus), link)


class Looked:
    """What several rows need, looked at once."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    @cached_property
    def driver(self) -> Driver | None:
        return None if self.asked.device == DeviceKind.CPU.value else driver()

    @cached_property
    def has_gpus(self) -> bool:
        return self.driver is not None and bool(self.driver.gpus)

    @property
    def gpus(self) -> GpuOffer:
        return _offer(self.driver)


def look(asked: Asked) -> NodeReport:
    """Look at this node."""
    looked = Looked(asked)
    found = (check(looked) for check in CHECKS)
    rdma = tuple(sorted(path.name for path in _RDMA.glob("*")))
    findings = tuple(finding for finding in found if finding is not None)
    return NodeReport(findings, looked.gpus, rdma, time.time())


def look_by_json(asked: str) -> str:
    """Look at this node, asked and answered in JSON: the launcher has a node of its cluster run this."""
    return look(Asked(**json.loads(asked))).to_json()


# --- The rows


def _release(looked: Looked) -> Finding | None:
    own, asked = version("alignedserve"), looked.asked.release
    if not asked or own == asked:
        return None
    return Finding(
        "release",
        Presence.MISSING,
        f"AlignedServe {own} is installed, and the launcher has {asked}",
        "install the same on all nodes; `ray up` does",
    )


def _reach(looked: Looked) -> Finding | None:
    if not (at := looked.asked.listens_at):
        return None
    host, _, port = at.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except OSError as error:
        what = f"port {port} of the head {host} is not reached ({error})"
        how = "let the nodes reach each other on all ports (firewall, security group)"
        return Finding("ports", Presence.MISSING, what, how)
    return Finding("ports", Presence.FOUND, f"the launcher at {at} is reached")


def _driver(looked: Looked) -> Finding | None:
    there = next((path for path in NVIDIA if Path(path).exists()), None)
    if looked.driver is None:
        if there is None or looked.asked.device == DeviceKind.CPU.value:
            return None
        how = "install NVIDIA's driver again and reboot; start a container with --gpus=all"
        return Finding("driver", Presence.ABSENT, f"{there} is here, but NVIDIA's driver does not answer", how)
    if not looked.driver.gpus:
        return None
    built = torch_is_built_for().get("cuda")
    if built is None:
        what, how = "torch is built without CUDA, so it sees none of the GPUs", "pip install torch from the usual index"
        return Finding("driver", Presence.MISSING, what, f"{how}, or set engine.device cpu")
    needed, has = int(built.partition(".")[0]), looked.driver
    if has.cuda < needed:
        what = f"driver {has.version} runs CUDA {has.cuda}, and torch is built for CUDA {built}, so it sees no GPU"
        how = f"install driver {_LEAST_DRIVER.get(needed, 'of that CUDA')} or newer"
        return Finding("driver", Presence.MISSING, what, how)
    return Finding("driver", Presence.FOUND, f"{has.version}, which runs torch's CUDA {built}")


def _roads(looked: Looked) -> Finding | None:
    """Say how the node's GPUs reach each other; without a direct road KV goes through the host's memory."""
    gpus = looked.gpus
    if gpus.number < 2:
        return None
    if gpus.link == Link.NONE.value:
        what = "some GPUs do not read each other's memory, so KV between them goes through the host's"
        how = "allow peer access (PCIe ACS off, or no virtual machine between), or leave it so"
        return Finding("roads", Presence.ABSENT, what, how)
    return Finding("roads", Presence.FOUND, f"{gpus.link} between all {gpus.number} GPUs")


def _c_compiler(looked: Looked) -> Finding | None:
    """Triton compiles what starts its kernels by a C compiler, with the header of Python."""
    if not looked.has_gpus:
        return None
    named = os.environ.get("CC")
    compiler = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if lacks := [*([] if compiler else ["no C compiler (gcc)"]), *([] if header.is_file() else [f"no {header}"])]:
        what = f"{' and '.join(lacks)}, so all kernels for GPUs fall back to torch, a hundred times slower"
        return Finding("C compiler", Presence.ABSENT, what, "apt-get install gcc libc6-dev python3-dev")
    return Finding("C compiler", Presence.FOUND, f"{compiler}, with Python.h")


def shared_memory(looked: Looked) -> Finding:
    asked, flag = looked.asked, settings()["kvpool.memory_mb"].flags[0]
    name, more = asked.directory, "start the container with --shm-size=2g"
    try:
        usage = shutil.disk_usage(name)
    except OSError:
        return Finding(name, Presence.MISSING, f"{name} is not there", "the KV pool lives in it: serve on Linux")
    free, wanted = usage.free // _MB, asked.pool_mb
    what = f"{free} MB free of {usage.total // _MB} MB"
    if wanted is not None and free < wanted:
        how = f"the KV pool takes {wanted} MB: start the container with a larger --shm-size"
        return Finding(name, Presence.MISSING, what, how + (f", or serve with {flag} {free}" if free else ""))
    if wanted is not None:
        return Finding(name, Presence.FOUND, what)
    what += f"; the KV pool takes half of it at most ({flag})"
    if usage.free < 2 * SHARED_RECORDS:
        return Finding(name, Presence.MISSING, what, f"too little to serve anything: {more}")
    if usage.free < _SMALL_SHM:
        how = f"few requests fit into that: {more} (Docker's default is 64m), or mount -o remount,size=50% {name}"
        return Finding(name, Presence.ABSENT, what, how)
    return Finding(name, Presence.FOUND, what)


def _locked_memory(looked: Looked) -> Finding | None:
    """Network cards that read memory by themselves take locked memory alone."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not looked.has_gpus or not any(_RDMA.glob("*")) or limit == resource.RLIM_INFINITY:
        return None
    what = f"a process may lock {limit // _MB} MB, too little for RDMA"
    return Finding("locked memory", Presence.ABSENT, what, "ulimit -l unlimited; of a container --ulimit memlock=-1")


def _open_files(looked: Looked) -> Finding | None:
    needed = looked.asked.open_files
    if not needed or (allowed := allow_open_files(needed)) >= needed:
        return None
    what = f"a process may open {allowed} files and needs {needed}"
    return Finding("open files", Presence.MISSING, what, f"ulimit -n {needed}; of a container --ulimit nofile={needed}")


def _model(looked: Looked) -> Finding | None:
    """Say whether the model is here, or can be fetched."""
    asked = looked.asked
    if not is_fetched(asked.model):
        path = Path(asked.model).expanduser()
        if not path.is_absolute() or path.exists():
            return None
        return Finding("model", Presence.MISSING, f"{path} is not here", "copy it to the same path on all nodes")
    there = fetched_bytes(asked.model, asked.cache)
    if asked.model_bytes and there >= asked.model_bytes:
        return Finding("model", Presence.FOUND, f"{asked.model} was fetched before")
    if is_hub_id(asked.model) and (why := why_no_access(asked.model)) is not None:
        how = "put a token with access into secrets/hf-token (HF_TOKEN), or name a model folder"
        return Finding("model", Presence.MISSING, f"{asked.model} cannot be fetched: {why}", how)
    return _disk(looked, there)


def _disk(looked: Looked, there: int) -> Finding | None:
    wanted, folder = looked.asked.model_bytes - there, _kept_in(looked.asked)
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if free >= wanted:
        return Finding("model", Presence.FOUND, f"{looked.asked.model} can be fetched")
    what = f"{folder} has {free / _GB:.0f} GB free, and {wanted / _GB:.0f} of the model are still to be fetched"
    return Finding("disk", Presence.MISSING, what, "free some, or set HF_HOME to a larger disk")


def _kept_in(asked: Asked) -> Path:
    """Return the folder to which the model is fetched."""
    if not is_hub_id(asked.model):
        return cache_directory(asked.cache)
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


CHECKS: tuple[Callable[[Looked], Finding | None], ...] = (
    *(_release, _reach, _driver, _roads, _c_compiler),
    *(shared_memory, _locked_memory, _open_files, _model),
)
