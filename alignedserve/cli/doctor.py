"""`alignedserve doctor`: shows what this machine has for serving, what it lacks, and how to get that.

It looks without importing: torch is tried in a process of its own, so that a broken torch is a finding, not a crash.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from alignedserve.architectures import model_source
from alignedserve.architectures.families.model_config import DTYPE_BYTES
from alignedserve.architectures.named_models import NAMED
from alignedserve.architectures.quantization import Quantization
from alignedserve.architectures.stored_form import StoredMethod
from alignedserve.config.choices import DeviceKind, Dtype
from alignedserve.config.config import Config, load
from alignedserve.errors import ConfigError
from alignedserve.kernels.build import NoCompiler, find_compiler
from alignedserve.kvpool.arena import numa
from alignedserve.launch.plan import needed_files
from alignedserve.launch.preflight import Asked, Finding, Presence, look
from alignedserve.machine import resources as machine
from alignedserve.safe_path import code_command
from alignedserve.sizing.accelerator import DeviceChoice, decide
from alignedserve.sizing.claims import claimed
from alignedserve.sizing.memory import SHARE_LEFT, FreeMemory

NEEDED = (  # beside torch
    *("safetensors", "tokenizers", "llguidance", "jinja2", "huggingface_hub", "numpy", "msgspec", "pyzmq", "fastapi"),
    *("pydantic", "uvicorn", "httptools", "prometheus-client", "httpx", "pyyaml", "fsspec"),
    "python-multipart",
)
_DEMO_FILES = ("config.json", "tokenizer.json", "model.safetensors")
_TORCH_LIMIT_S = 300  # it may compile all kernels of a GPU
_PAGE, _FLASH_3 = 256, "FlashAttention 3"  # tokens; as kernels/dispatch/paged_libraries.py has it: that imports torch
_FOR_FLASH_3 = "for chunks of requests of 1,024 tokens, on GPUs of compute capability 9.0; ours attends otherwise"
_OF_FLASH_3, _FLASH_EXTRA = "tokenspeed-fa3", "alignedserve[flash]"  # the package that the extra installs
_MB = 1 << 20
_BILLION = 10**9
_AS = {
    Quantization.NONE: "in bfloat16",
    Quantization.INT8: "with --quantization int8",
    Quantization.INT4: "with --quantization int4",
}
# On models of 135 M; a worker measures its own (executor/precision.py).
_COSTS = "in nats a token from plain weights, int8 costs about 0.003, int4 0.002 to 0.2: a worker's log says its own"
_SHM = Path("/dev/shm")

# This runs in another process: importing torch takes seconds, and may end the process. So may importing the kernels:
# each prints a line of its own.
_TRY_TORCH = """
import json, torch
cuda = torch.cuda
gpus = [cuda.get_device_properties(i) for i in range(cuda.device_count())] if cuda.is_available() else []
floats = {True: ", multiplies 8-bit floats", False: ""}
gpus = [f"{gpu.name}, {gpu.total_memory >> 30} GiB{floats[(gpu.major, gpu.minor) >= (8, 9)]}" for gpu in gpus]
sends = torch.distributed.is_available()
pairs = [(i, j) for i in range(len(gpus)) for j in range(i)]
apart = [(j, i) for i, j in pairs if not (cuda.can_device_access_peer(i, j) and cuda.can_device_access_peer(j, i))]
print(json.dumps({"version": torch.__version__, "gpus": gpus, "sends": sends, "apart": apart}), flush=True)
"""
_TRY_KERNELS = """
import dataclasses
from alignedserve.fallbacks import fallbacks
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.kernels.dispatch.paged_libraries import installed
from alignedserve.kernels.common.threads import openmp_libraries
chosen = choose(torch.device("cpu"), torch.bfloat16)
if gpus:
    choose(torch.device("cuda", 0), torch.bfloat16, block_size=BLOCK_SIZE)  # compiles and tries each kernel
torch.ones(1 << 20).sum()  # in threads, so that their pool is there
pools = sorted(openmp_libraries())
native = chosen.kernels.name.startswith("C++")
what = f"{chosen.kernels.name}: {chosen.why}"
paged, lacking = installed()
fallen = [dataclasses.asdict(fallback) for fallback in fallbacks()]
told = {"native": native, "what": what, "pools": pools, "paged": paged, "lacking": lacking, "fallen": fallen}
print(json.dumps(told))
"""


@dataclass(frozen=True)
class FoundKernels:
    """The kernels that were chosen and why, and the OpenMP libraries that are in the process then; attention of other
    libraries for GPUs, and why there is no more of it."""

    native: bool
    what: str
    pools: Sequence[str]
    paged: Sequence[str] = ()
    lacking: Sequence[str] = ()
    fallen: Sequence[Mapping[str, str]] = ()  # what does not work, as `Fallback` has it


@dataclass(frozen=True)
class FoundTorch:
    version: str
    gpus: Sequence[str]
    kernels: FoundKernels | str  # or why they do not run
    sends: bool = False  # so workers can send KV to each other
    apart: Sequence[Sequence[int]] = ()  # pairs of GPUs that do not read each other's memory


def run(as_json: bool = False, of_node: bool = False, file: Path | None = None) -> int:
    """Print all findings, or those alone that a node of a cluster is asked for; return 0 where this machine can serve,
    and 1 otherwise. `file` has the settings of what is to be served."""
    if of_node:
        asked = load({}, os.environ, file)
        report = look(Asked.of(asked, open_files=needed_files(asked)))
        if as_json:
            print(report.to_json())
        else:
            _print(list(report.findings), report.serves)
        return 0 if report.serves else 1
    found = list(findings(file))
    serves = all(finding.state is not Presence.MISSING for finding in found)
    if as_json:
        print(json.dumps({"can_serve": serves, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        _print(found, serves)
    return 0 if serves else 1


def _print(found: list[Finding], serves: bool) -> None:
    marks = {Presence.FOUND: "ok", Presence.ABSENT: "-", Presence.MISSING: "MISSING"}
    for finding in found:
        print(f"{marks[finding.state]:8}{finding.name:18}{finding.what}")
        if finding.how:
            print(f"{'':26}{finding.how}")
    print("This machine can serve: try `alignedserve serve`." if serves else "This machine cannot serve yet.")


def findings(file: Path | None = None) -> Iterator[Finding]:
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("python", Presence.FOUND, python)
    cores = f"{machine.usable_cores():g} that this process may use, {os.cpu_count()} in all"
    yield Finding("cores", Presence.FOUND, cores)
    free = FreeMemory.here(_SHM) if _SHM.is_dir() else None
    yield _memory(free)
    yield _weights(free)
    asked = decided = None
    try:
        asked = load({}, os.environ, file)
        yield _precision(asked)
        decided = decide(asked)
        yield from look(Asked.of(decided[0], open_files=needed_files(decided[0]))).findings
    except ConfigError as error:
        how = "correct or unset the environment variable, or correct the file"
        yield Finding("configuration", Presence.MISSING, str(error), how)
    yield _numa()
    yield from _torch(asked, decided)
    for name in NEEDED:
        yield _package(name)
    yield _package("transformers", "for models that have no module of ours", "alignedserve[transformers]")
    yield _package("triton", "the kernels for GPUs")
    yield _package("uvloop", "a faster event loop for the gateway")
    yield _package(_OF_FLASH_3, f"{_FLASH_3}, {_FOR_FLASH_3}", _FLASH_EXTRA)
    yield _package("flash-attn", f"attention on GPUs, where blocks have a multiple of {_PAGE} tokens")
    yield _package("redis", "for --jobs-store redis://", "alignedserve[redis]")
    yield _package("ray", "for --ray")
    redis = shutil.which("redis-server") or shutil.which("valkey-server")
    if redis is None:
        what = "not on the path: batch jobs are kept in SQLite"
        yield Finding("redis-server", Presence.ABSENT, what, "--jobs-store redis://HOST takes one from elsewhere")
    else:
        yield Finding("redis-server", Presence.FOUND, f"{redis} (for --jobs-store redis://)")
    folder = model_source.DEMO_FOLDER
    if lacking := [name for name in _DEMO_FILES if not (folder / name).is_file()]:
        how = "install AlignedServe again, or take the folder from its source tree"
        yield Finding("demo model", Presence.MISSING, f"{folder} lacks {', '.join(lacking)}", how)
    else:
        yield Finding("demo model", Presence.FOUND, str(folder))
    yield from map(_named_model, NAMED)


def _memory(free: FreeMemory | None) -> Finding:
    """Return how much memory is free, and how much of it a deployment would plan with."""
    found = machine.memory()
    if found is None:
        return Finding("memory", Presence.ABSENT, "unknown: this system has no /proc/meminfo")
    limited = f", limited to {found.limit // _MB} MB" if found.limit is not None else ""
    what = f"{found.available // _MB} MB available of {found.total // _MB} MB{limited}"
    if free is not None and free.usable is not None:
        others = claimed(_SHM) // _MB
        taken = f", and running deployments may take {others}" if others else ""
        what += f"; a deployment plans with {free.usable // _MB}: {SHARE_LEFT:.0%} stay for other programs{taken}"
    return Finding("memory", Presence.FOUND, what)


def _weights(free: FreeMemory | None) -> Finding:
    """Return what weights take in each way to keep them, and how large a model's may be."""
    usable, ways = None if free is None else free.usable, []
    for kept in Quantization:
        each = kept.num_bytes(_BILLION, 0, 0, DTYPE_BYTES["bfloat16"])
        fits = "" if usable is None else f", {usable / each:.0f} billion fit"
        ways.append(f"{each / _BILLION:.1f} GB {_AS[kept]}{fits}")
    what = f"a billion parameters take {'; '.join(ways)}"
    return Finding("weights", Presence.FOUND, what, "KV and the KV pool get what these leave" if usable else "")


def _precision(asked: Config) -> Finding:
    """Return how weights would be kept."""
    engine = asked.engine
    kept = "as the model has them" if engine.quantization is Quantization.NONE else engine.quantization.value
    dtype = "the model's own type" if engine.dtype is Dtype.AUTO else engine.dtype.value
    what = f"weights of linear layers {kept}, all else in {dtype}"
    return Finding("precision", Presence.FOUND, what, _COSTS)


def _numa() -> Finding:
    place, nodes = numa.best_place(), numa.num_nodes()
    if place is not None:
        what = f"{nodes} nodes, the KV pool's memory goes to node {place.node}: {place.why}"
        return Finding("NUMA", Presence.FOUND, what)
    if nodes > 1:
        how = "let it run on the CPUs of the GPUs' node"
        return Finding("NUMA", Presence.ABSENT, f"{nodes} nodes, and it may not run on that of the GPUs", how)
    return Finding("NUMA", Presence.FOUND, "one node, nothing to choose")


def _torch(asked: Config | None, decided: tuple[Config, DeviceChoice] | None) -> Iterator[Finding]:
    """Yield what torch is like here, and what depends on it; both are None where the configuration is wrong, and the
    second where it does not go with the device that is here."""
    if _version("torch") is None:
        yield Finding("torch", Presence.MISSING, "not installed", "pip install torch")
        return
    block_size = None if asked is None else asked.engine.block_size
    tried = _try_torch(block_size)
    if isinstance(tried, str):
        yield Finding("torch", Presence.MISSING, f"{_version('torch')} is installed, but: {tried}", "install it again")
        return
    yield Finding("torch", Presence.FOUND, tried.version)
    state = Presence.FOUND if tried.gpus else Presence.ABSENT
    yield Finding("gpu", state, "; ".join(tried.gpus) or "none that torch sees")
    if asked is not None and decided is not None:
        yield _device(asked, *decided, tried)
    yield _transports(tried)
    yield from _kernels(tried.kernels, block_size)


def _device(asked: Config, config: Config, choice: DeviceChoice, tried: FoundTorch) -> Finding:
    """Return where workers would compute and why, and how large their steps may be there."""
    chosen = "auto takes " if asked.engine.device is DeviceKind.AUTO else ""
    steps = f"steps of up to {config.engine.seats} requests and {config.engine.step_tokens} tokens"
    what = f"{chosen}{choice.device.value}: {choice.why}; {steps}"
    if choice.device is DeviceKind.CUDA and not tried.gpus:
        return Finding("device", Presence.MISSING, what, "torch sees no GPU: set engine.device to auto or cpu")
    if choice.is_fallback:
        how = "install a torch for this GPU and its driver, or set engine.device to cpu"
        return Finding("device", Presence.ABSENT, what, how)
    return Finding("device", Presence.FOUND, what)


def _try_torch(block_size: int | None) -> FoundTorch | str:
    """Return what torch and our kernels are like here, or why torch does not run."""
    code = f"BLOCK_SIZE = {block_size}\n{_TRY_TORCH}{_TRY_KERNELS}"
    try:
        done = subprocess.run(code_command(code), capture_output=True, text=True, timeout=_TORCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"importing it took more than {_TORCH_LIMIT_S} s"
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    fault = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if not said:
        return fault
    return FoundTorch(**said[0], kernels=fault if done.returncode else FoundKernels(**said[1]))


def _transports(tried: FoundTorch) -> Finding:
    """Return how KV can go from worker to worker, and the direct road of each pair of GPUs."""
    if tried.sends and tried.gpus:
        pairs = [(first, second) for second in range(len(tried.gpus)) for first in range(second)]
        apart = {(first, second) for first, second in tried.apart}
        roads = (f"GPUs {a} and {b} {'host' if (a, b) in apart else 'ipc'}" for a, b in pairs)
        auto = "auto takes host where prefill workers lend, as by default, and with prefill.lends never ipc on one GPU"
        return Finding("transports", Presence.FOUND, "; ".join([auto, *roads]))
    if tried.sends:
        what = "host, which auto takes; collective and ipc where asked for"
        return Finding("transports", Presence.FOUND, what)
    how = "only --transport collective and ipc ask for it: install a torch that has it"
    return Finding("transports", Presence.ABSENT, "host alone: this torch has no torch.distributed", how)


def _kernels(tried: FoundKernels | str, block_size: int | None) -> Iterator[Finding]:
    if isinstance(tried, str):
        yield Finding("kernels", Presence.MISSING, tried, "install AlignedServe again")
        return
    state = Presence.FOUND if tried.native else Presence.ABSENT
    yield Finding("kernels", state, tried.what)
    # Name the formats of quantised weights that we read, and say whether kernels multiply without expanding.
    expands = "" if tried.native else "; without the kernels each call expands them: slowly"
    yield Finding(
        "quantised weights", state, f"read from {', '.join(method.value for method in StoredMethod)}{expands}"
    )
    try:
        yield Finding("C++ compiler", Presence.FOUND, " ".join(find_compiler()))
    except NoCompiler as lack:
        yield Finding("C++ compiler", Presence.ABSENT, str(lack), "only installing from source asks for it")
    pools = ", ".join(tried.pools) or "none that can be seen"
    if len(tried.pools) > 1:  # the second would spin on the same cores
        how = "unset LD_PRELOAD, or install torch again"
        yield Finding("OpenMP", Presence.ABSENT, f"more than one pool: {pools}", how)
    else:
        yield Finding("OpenMP", Presence.FOUND, f"{pools}, one pool for torch and the kernels")
    yield _paged(tried, block_size)
    if not tried.fallen:
        yield Finding("fallbacks", Presence.FOUND, "none: all kernels for this machine work")
    for fallback in tried.fallen:
        yield Finding("fallback", Presence.ABSENT, "{what}: {instead} ({why})".format(**fallback))


def _paged(tried: FoundKernels, block_size: int | None) -> Finding:
    """Return whether steps on a GPU would use attention of other libraries; a worker's log says what it chose."""
    there = [f"{library} is there" + f" ({_FOR_FLASH_3})" * (library == _FLASH_3) for library in tried.paged]
    what = "; ".join((*there, *tried.lacking))
    if block_size is None:
        return Finding("GPU attention", Presence.ABSENT, what)
    if _FLASH_3 not in tried.paged and block_size % _PAGE:
        how = (
            f"{_FLASH_3} ({_FOR_FLASH_3}) needs pip install '{_FLASH_EXTRA}', and the others read blocks "
            f"of a multiple of {_PAGE} tokens, where engine.block_size is {block_size}: ours is used alone"
        )
        return Finding("GPU attention", Presence.ABSENT, what, how)
    return Finding("GPU attention", Presence.FOUND if tried.paged else Presence.ABSENT, what)


def _package(name: str, purpose: str = "", extra: str = "") -> Finding:
    """Return whether a package is installed. One with a `purpose` is optional; the `extra` that installs it knows which
    versions fit."""
    found, serves = _version(name), f" ({purpose})" if purpose else ""
    if found is not None:
        return Finding(name, Presence.FOUND, f"{found}{serves}")
    how = f"pip install '{extra}'" if extra else f"pip install {name}"
    return Finding(name, Presence.ABSENT if purpose else Presence.MISSING, f"not installed{serves}", how)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _named_model(name: str) -> Finding:
    model, cache = NAMED[name], model_source.cache_directory(None)
    if model.is_in(cache):
        return Finding(name, Presence.FOUND, str(model.path(cache)))
    what = f"not fetched yet: {model.wheel_bytes / 1e6:.0f} MB, by pip"
    return Finding(name, Presence.ABSENT, what, f"alignedserve serve {name}")
