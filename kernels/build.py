"""Compile csrc/ into one shared library with a plain C interface, which knows nothing of torch or Python.

Each source is compiled once for each instruction set, and the library chooses one at run time. `python
kernels/build.py` builds it in place for this machine's CPU, and installing does so too (setup.py). With `--all` it is
for every CPU of a kind, three times the work. With `--tested` the library has what this CPU can run. Only `--all` makes
fast code of sets that this CPU would not choose. `--elsewhere` builds no library: every second set that this CPU cannot
run is compiled without optimisation, which shows what a compiler refuses. Only the standard library is imported:
setup.py and make run this file before anything is installed.

The library says from which sources it was built, and a library from other sources is not used (library.py):
its kernels might take other arguments than the Python code passes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCES = Path(__file__).resolve().parent / "csrc"
LIBRARY = Path(__file__).resolve().parent / "libalignedserve_kernels.so"
ONCE = "library.cpp"  # all other sources are compiled per instruction set
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_VNNI = (*_AVX512, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
# From the least to the best: a CPU that can run a set can run all sets before it.
X86: dict[str, tuple[str, ...]] = {
    "generic": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512vnni": _VNNI,
    "avx512bf16": _BF16,
    "amx": (*_BF16, "-mamx-tile", "-mamx-bf16"),
}
# What GCC and Clang define where `-march=native` has the set.
_MACROS = {
    "avx2": "__AVX2__",
    "avx512": "__AVX512BW__",
    "avx512vnni": "__AVX512VNNI__",
    "avx512bf16": "__AVX512BF16__",
    "amx": "__AMX_BF16__",
}
# OpenMP without its library: the process has torch's, and must not have a second pool of spinning threads.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=off",  # code that wants one rounding says fma(): results are the same with and without FMA
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)  # both only see GCC's own intrinsics


_TELLS_S = 5.0  # between two lines that say how far it is


class Cpus(Enum):
    """Say for which CPUs a library is built."""

    HERE = "here"  # the sets that this machine's CPU would choose, and that of any CPU
    TESTED = "tested"  # all that it can run
    ALL = "all"  # all that the compiler knows


class BuildFailed(Exception):
    """The compiler refused a source; the message is one line."""


class NoCompiler(BuildFailed):
    pass


def build(library: Path = LIBRARY, cpus: Cpus = Cpus.HERE) -> str:
    """Build the library and return a line that says what was built; print how far it is."""
    compiler = find_compiler()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sets = [isa for isa in _instruction_sets() if _accepts(compiler, X86.get(isa, ()), folder)]
        best = used_here(compiler, sets)
        sets = {Cpus.HERE: best, Cpus.TESTED: run_here(compiler, sets), Cpus.ALL: sets}[cpus]
        (folder / "built_for.h").write_text("".join(f"BUILT_FOR({isa})\n" for isa in sets))
        (folder / "built_from.h").write_text(f'#define BUILT_FROM "{sources()}"\n')
        fast = sets if cpus is Cpus.ALL else best[1:] or best
        jobs = [job if isa in ("", *fast) else _slow(job) for isa, job in _jobs(sets, folder)]
        _run_all(compiler, jobs)
        objects = [job[-1] for job in jobs]
        made = folder / library.name
        # No -fopenmp here: GOMP_parallel and its kin stay unresolved until a process that has them loads this library.
        _run([*compiler, "-shared", "-o", str(made), *objects, "-lm"])
        library.parent.mkdir(parents=True, exist_ok=True)
        beside = library.with_suffix(f".{os.getpid()}.new")  # a process that has the old library mapped keeps it
        shutil.copy(made, beside)
        beside.replace(library)
    return f"{library} for {' '.join(sets)}, with {shlex.join(compiler)}"


def try_elsewhere() -> str:
    """Compile every second set that this CPU cannot run, and return a line that says which."""
    compiler = find_compiler()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sets = [isa for isa in _instruction_sets() if _accepts(compiler, X86.get(isa, ()), folder)]
        beyond = [isa for isa in sets if isa not in run_here(compiler, sets)][::-2]
        _run_all(compiler, [["-O0", *job] for isa, job in _jobs(beyond, folder) if isa])
    return f"compiled, and not kept: {' '.join(beyond) or 'no set, since this CPU can run all'}"


def _run_all(compiler: Sequence[str], jobs: Sequence[list[str]]) -> None:
    began = told = time.monotonic()
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for done, _ in enumerate(pool.map(lambda job: _run([*compiler, *_FLAGS, *job]), jobs), 1):
            if (now := time.monotonic()) - told >= _TELLS_S or done == len(jobs):
                told = now
                print(f"C++ kernels: {done} of {len(jobs)} files compiled in {now - began:.0f} s", flush=True)


def sources() -> str:
    """Return a name for the sources that the library is built from: this file and all files in csrc/."""
    read = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(SOURCES.glob("*.*")):
        read.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return read.hexdigest()[:16]


def find_compiler() -> list[str]:
    """Return the command that compiles C++: the variable CXX, or the first compiler on the path."""
    if named := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(named[0]):
            return named
        raise NoCompiler(f"no C++ compiler found: the environment variable CXX names {named[0]}, which is not there")
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return [path]
    raise NoCompiler("no C++ compiler found: install g++, or name one in the environment variable CXX")


def _jobs(sets: Sequence[str], folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield what the compiler is given beside the flags of all, with the instruction set or ""."""
    include = f"-I{folder}"
    for source in sorted(SOURCES.glob("*.cpp"), key=lambda source: (-source.stat().st_size, source.name)):  # long first
        for isa in ("",) if source.name == ONCE else sets:
            flags = (include, *X86.get(isa, ()), *([f"-DISA={isa}"] if isa else []))
            yield isa, [*flags, "-c", str(source), "-o", str(folder / f"{source.stem}.{isa}.o")]


def _slow(job: list[str]) -> list[str]:
    """Return the same, compiled to slower code in a third of the time. Without all of -O3 a compiler makes functions of
    the standard library's templates, and the linker would keep those of one instruction set for all."""
    source = Path(job[-3]).read_text()
    return job if "<vector>" in source or '"beginnings.h"' in source else ["-O1", *job]


def _instruction_sets() -> list[str]:
    return list(X86) if platform.machine() in ("x86_64", "AMD64") else ["generic"]


def used_here(compiler: Sequence[str], sets: Sequence[str]) -> list[str]:
    """Return the sets that this machine's CPU would choose from these, or all where the compiler does not say."""
    if not (defined := _defined(compiler)):
        return list(sets)
    known = [isa for isa in sets if isa in _MACROS and _MACROS[isa] in defined]
    best = known[-2:] if known[-1:] == ["amx"] else known[-1:]  # not every system lets its processes use AMX
    return ["generic", *best]


def run_here(compiler: Sequence[str], sets: Sequence[str]) -> list[str]:
    """Return the sets that this machine's CPU can run, or all where the compiler does not say."""
    defined = _defined(compiler)
    return [isa for isa in sets if not defined or isa not in _MACROS or _MACROS[isa] in defined]


def _defined(compiler: Sequence[str]) -> set[str]:
    """Return the macros that the compiler defines for this machine's CPU."""
    asked = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return set() if done.returncode else {line.split()[1] for line in done.stdout.splitlines()}


def _accepts(compiler: Sequence[str], flags: Sequence[str], folder: Path) -> bool:
    empty = folder / "empty.cpp"
    empty.write_text("#include <cstdint>\n")
    command = [*compiler, *_FLAGS, *flags, "-c", str(empty), "-o", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:300])
        raise BuildFailed(f"{command[0]} failed: {said}")
    if done.stderr.strip():
        print(done.stderr, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the C++ kernels in place.")
    parser.add_argument("--optional", action="store_true", help="where they cannot be built, say so and end with 0")
    cpus = parser.add_mutually_exclusive_group()
    kinds = {Cpus.ALL: "for every CPU of this kind: three times the work", Cpus.TESTED: "all that this CPU can run"}
    for which, about in kinds.items():
        cpus.add_argument(f"--{which.value}", action="store_const", dest="cpus", const=which, help=about)
    cpus.add_argument("--elsewhere", action="store_true", help="only try what other CPUs can run; nothing is kept")
    options = parser.parse_args()
    try:
        print(try_elsewhere() if options.elsewhere else build(cpus=options.cpus or Cpus.HERE))
    except BuildFailed as failure:
        if not options.optional:
            sys.exit(str(failure))
        print(f"{failure}; until then, torch computes")


if __name__ == "__main__":
    main()
