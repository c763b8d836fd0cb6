"""Measure everything on a GPU that is at hand for a quarter of an hour.

    python tools/quarter.py --collect wheels                                  # here: packages that the machine lacks
    python tools/quarter.py --part a --seconds 400 --out DIR                  # there: kernels and the engine
    python tools/quarter.py --part b --seconds 360 --out DIR --wheels wheels  # there: the whole server, and the rest
    python tools/quarter.py --only decode,server --seconds 120 --out DIR
    python tools/quarter.py --part a,b --dry --seconds 900 --out DIR          # tried without a GPU, on a tiny model

Each step is a process group of its own with a time limit: a step that crashes, hangs or prints without end costs only
itself, and all that it has started ends with it. After such a step a fresh process asks the GPU whether it still
computes; where it does not, nothing more is run. What decides most comes first: steps that no longer fit into the time
are left out. The first run compiles and measures kernels, whose choices later ones find. At the end there is a table.

DIR gets stdout.log and stderr.log, to which the steps write themselves, results.jsonl (every figure with its step, and
how every step ended) and junit-*.xml. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).parents[1]
MOST_SAID = 8 << 20  # bytes: a step that says more is ended
ASKING_S = 60.0  # for a question to torch, to git or to pip
MARK = "QUARTER_STEP"  # in the environment of all that a step starts
LEAST_S = 5.0  # a step with less time is left out
GRACE_S = 3.0  # between asking a step to end and killing it
LOOK_S = 0.1


# What a server needs beside torch, Triton and transformers, for Python 3.12 on Linux: 8 MB.
WHEELS = (
    "msgspec pyzmq fastapi starlette pydantic pydantic-core annotated-types typing-inspection uvicorn httptools "
    "llguidance python-multipart opentelemetry-api"
).split()
FLASH = "tokenspeed-fa3==3.0.0.post20260810"  # FlashAttention 3, to compare with: 63 MB, and 29 MB as FLASH_ARCHIVE
FLASH_ARCHIVE = "flash.tar.xz"
PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_17")

WHAT_IS_HERE = (
    "import torch; has = torch.cuda.is_available();"
    "print(torch.__version__, torch.cuda.get_device_name(0) if has else 'none', sep=';')"
)
STILL_COMPUTES = "import torch; x = torch.ones(1 << 20, device='cuda'); assert float((x + x).sum()) == 2 << 20"


@dataclass(frozen=True)
class Step:
    part: str
    name: str
    command: tuple[str, ...]  # of Python
    limit_s: float
    title: str  # what it measures


def gpu(module: str, only: str, *more: str) -> tuple[str, ...]:
    return "-m", f"lab.benchmarks.{module}", "--only", only, *more


def tests(name: str, *paths: str) -> tuple[str, ...]:
    settings = ("--confcutdir=tests/gpu", "-v", "-p", "no:cacheprovider", "-n", "12", "--durations=10")
    return "-m", "pytest", *settings, f"--junitxml={{out}}/junit-{name}.xml", *paths


STEPS = (
    Step("a", "right", tests("a", "tests/gpu/test_kernels.py", "tests/gpu/test_sampling.py", "tests/gpu/test_engine.py",
        "-k", "not quantised and not int8"), 120, "Tests of kernels and engines"),
    Step("a", "warm", gpu("gpu", "warm"), 120, "A first start: all choices of all kernels"),
    Step("a", "decode", gpu("gpu", "decode"), 80, "Decode steps of the 8B"),
    Step("a", "prompts", gpu("gpu", "prompts"), 60, "Prompts, alone and beside decodes"),
    Step("a", "copies", gpu("gpu", "copies"), 80, "Copies, and steps beside them"),
    Step("a", "ceilings", gpu("gpu_ceilings", "ceilings"), 40, "What the GPU can do"),
    Step("a", "attention", gpu("gpu_ceilings", "attention"), 40, "Attention beside other libraries"),
    Step("a", "pdl", gpu("gpu", "pdl"), 60, "Kernels that begin while others end: the same, and faster?"),
    Step("a", "kernels", gpu("gpu", "kernels"), 40, "What a step's time goes to"),
    Step("a", "draws", gpu("gpu_ceilings", "draws"), 40, "Tokens drawn from logits, and masks"),
    Step("b", "server", gpu("gpu_server", "streams,beside,offline,shared,kill"), 180, "The whole server"),
    Step("b", "experts-fp8", gpu("gpu", "decode", "--model", "moe-fp8"), 120, "A mixture with experts in 8-bit floats, "
        "blocks of 128 by 128: 4 of 48 layers"),
    Step("b", "experts-whole", gpu("gpu", "decode", "--model", "moe-fp8-whole"), 100, "The same with all 48 layers"),
    Step("b", "experts", gpu("gpu", "decode", "--model", "moe"), 100, "A mixture of experts: 4 of 48 layers"),
    Step("b", "separate", gpu("gpu_server", "separate"), 70, "Prompts and decodes apart, on one GPU"),
    Step("b", "quantised", gpu("gpu", "quantised"), 80, "Quantised weights"),
    Step("b", "others", tests("b", "tests/gpu/test_transports.py", "tests/gpu/test_products.py",
        "tests/gpu/test_experts.py", "tests/gpu/test_rehearsing.py", "tests/gpu/test_sums.py"), 90,
        "Tests of transports, quantised weights and sums of ranks"),
    Step("b", "alignment", gpu("gpu_ceilings", "alignment"), 30, "Long requests among short"),
)  # fmt: skip


class Results:
    """The files of a run. Steps write to their logs themselves, so that what was said is kept whatever comes."""

    def __init__(self, out: Path, about: dict[str, Any]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.lines: list[dict[str, Any]] = []
        self._about = about
        self._results = (out / "results.jsonl").open("w", encoding="utf-8")
        self.logs = [(out / name).open("wb") for name in ("stdout.log", "stderr.log")]

    def add(self, line: dict[str, Any]) -> None:
        line = {**line, **self._about}
        self.lines.append(line)
        print(json.dumps(line), file=self._results, flush=True)

    def close(self) -> None:
        for file in (self._results, *self.logs):
            file.close()


def run_step(
    step: Step, command: Sequence[str], limit_s: float, environment: dict[str, str], results: Results
) -> dict[str, Any]:
    """Run a step for a limited time, add the printed figures to the results, and return how the step ended."""
    began, mark = time.monotonic(), f"{step.name}-{os.getpid()}-{time.monotonic_ns()}"
    for log in results.logs:
        log.write(f"=== {step.name}\n".encode())
        log.flush()
    starts = [_size(log) for log in results.logs]
    group = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=results.logs[0],
        stderr=results.logs[1],
        start_new_session=True,
    )
    status = "ok"
    while group.poll() is None and status == "ok":
        time.sleep(LOOK_S)
        if time.monotonic() - began >= limit_s:
            status = "limit"
        elif sum(map(_size, results.logs)) > sum(starts) + MOST_SAID:
            status = "says too much"
    if status != "ok":
        _end(group, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            group.wait(GRACE_S)
    _end(group, signal.SIGKILL)
    code = group.wait()
    _end_what_is_left(mark)
    if status == "ok" and code:
        status = "failed" if code > 0 else f"died of {signal.Signals(-code).name}"
    with open(results.logs[0].name, "rb") as said:
        said.seek(starts[0])
        figures = [figure for line in said if (figure := _figure(line)) is not None]
    for figure in figures:
        results.add({"step": step.name, **figure})
    seconds = round(time.monotonic() - began, 1)
    return {"step": step.name, "status": status, "rc": code, "seconds": seconds, "figures": len(figures)}


def _size(log: BinaryIO) -> int:
    return os.fstat(log.fileno()).st_size


def _end(group: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group.pid, number)


def _end_what_is_left(mark: str) -> None:
    """Kill what a step has started in sessions of its own, such as a server that holds the GPU's memory."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended by now, or is not ours
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _figure(line: bytes) -> dict[str, Any] | None:
    """Return the figure that a line holds, if it holds one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return {key: value for key, value in found.items() if value is not None} if isinstance(found, dict) else None


def run_all(steps: Sequence[Step], seconds: float, results: Results, out: Path, dry: bool, site: str | None) -> bool:
    """Run the steps, one after the other, within `seconds`; return whether all went well."""
    ends_at, went_well = time.monotonic() + seconds, True
    environment = _environment(site, dry)
    for step in steps:
        left = ends_at - time.monotonic()
        if left < LEAST_S:
            results.add({"step": step.name, "status": "left out", "why": "no time is left"})
            went_well = False
            continue
        command = [sys.executable, *(part.replace("{out}", str(out)) for part in step.command)]
        ended = run_step(step, command, min(step.limit_s, left), environment, results)
        results.add(ended)
        print(f"{step.name}: {ended['status']}, {ended['figures']} figures, {ended['seconds']} s", flush=True)
        if ended["status"] != "ok":
            went_well = False
            if not dry and (why := _lost(environment)):
                results.add({"step": step.name, "status": "lost", "why": why})
                print(f"the GPU computes no more: {why}", flush=True)
                break
    return went_well


def _environment(site: str | None, dry: bool) -> dict[str, str]:
    paths = [site, str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH")]
    own = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if dry:
        own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}


def _lost(environment: dict[str, str]) -> str:
    """Return why the GPU does not compute any more; nothing where it does."""
    try:
        subprocess.run(
            [sys.executable, "-c", STILL_COMPUTES], env=environment, check=True, timeout=60, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return "it does not answer within a minute"
    except subprocess.CalledProcessError as error:
        said: bytes = error.stderr
        return said.decode(errors="replace").strip().rpartition("\n")[2][:300]
    return ""


def dried(step: Step) -> Step:
    """Return the step on a tiny model; tests of a GPU skip."""
    if step.command[1] == "pytest":
        # In one process: pytest-xdist (`-n`), which the GPU's machine has, may not be here.
        command = tuple(part for part in step.command if part not in ("-n", "12"))
        return Step(step.part, step.name, command, 120, step.title)
    command, tiny = step.command, "tiny"
    if "--model" in command:
        at = command.index("--model")
        command, tiny = command[:at], f"tiny-{command[at + 1].removesuffix('-whole')}"
    return Step(step.part, step.name, (*command, "--model", tiny), 240, step.title)


def collect(folder: Path) -> int:
    """Download the wheels for the machine; the large one is packed again, so that it can be carried."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform={name}_x86_64" for name in (*PLATFORMS, "manylinux2014", "manylinux1")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version=3.12", "--implementation=cp", *platforms]
    if code := subprocess.run([*command, "-d", str(folder), *WHEELS]).returncode:
        return code
    with tempfile.TemporaryDirectory() as large:
        if code := subprocess.run([*command, "-d", large, FLASH]).returncode:
            return code
        (wheel,) = Path(large).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed, tarfile.open(folder / FLASH_ARCHIVE, "w:xz", preset=9) as archive:
            packed.extractall(Path(large) / "wheel")
            archive.add(Path(large) / "wheel", ".")
    return 0


def install(wheels: Path, folder: str) -> str:
    """Install the wheels into the folder, without their needs: the machine has those."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--upgrade", "--target", folder, *map(str, wheels.glob("*.whl"))]
    subprocess.run(command, check=True, timeout=ASKING_S)
    if (wheels / FLASH_ARCHIVE).exists():
        with tarfile.open(wheels / FLASH_ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
    return folder


# --- What is shown


def table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield rows of what was measured, and how each step ended."""
    for line in lines:
        if "status" in line:
            why = f": {line['why']}" if "why" in line else ""
            yield f"== {line['step']}: {line['status']}{why}"
        elif "left_out" in line:
            yield f"   {line['name']}: left out: {line['left_out'][:110]}"
        elif "value" in line:
            goal = "" if "met" not in line else f"  {'met' if line['met'] else 'MISSED'} (goal {line['goal']:g})"
            ratio = f"  x{line['ratio']:g}" if "ratio" in line else ""
            yield f"   {line['name']}: {line['value']:g} {line['unit']}{ratio}{goal}"


def about(commit: str | None) -> dict[str, Any]:
    """Return what all figures of a run have in common."""
    torch, _, gpu_name = _asked([sys.executable, "-c", WHAT_IS_HERE]).partition(";")
    if commit is None:
        commit = _asked(["git", "rev-parse", "--short=8", "HEAD"])
    return {"gpu": gpu_name, "torch": torch, "commit": commit, "date": time.strftime("%Y-%m-%d")}


def _asked(command: Sequence[str]) -> str:
    """Return what a command says; nothing where it cannot say it in time."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=ASKING_S).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--part", default="a,b", help="a, b, or both (default: a,b)")
    parser.add_argument("--only", help=f"steps, separated by commas: {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=400.0, help="for all steps together (default: 400)")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that steps need")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--collect", type=Path, metavar="DIR", help="download the wheels there, and end")
    options = parser.parse_args()
    if options.collect:
        return collect(options.collect)
    if options.out is None:
        parser.error("say where the results go: --out DIR")
    wanted = options.only.split(",") if options.only else [s.name for s in STEPS if s.part in options.part.split(",")]
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"no step {unknown[0]}: there are {', '.join(names)}")
    by_name = {step.name: step for step in STEPS}
    steps = [by_name[name] for name in wanted]
    if options.dry:
        steps = [*map(dried, steps)]
    results = Results(options.out, about(options.commit))
    with tempfile.TemporaryDirectory() as folder:
        site = install(options.wheels, folder) if options.wheels else None
        went_well = run_all(steps, options.seconds, results, options.out.resolve(), options.dry, site)
    results.close()
    print("\n".join(table(results.lines)))
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main())
