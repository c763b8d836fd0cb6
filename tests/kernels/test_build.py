"""Tests that the library is built from exactly these sources, and that a missing library is explained in a line."""

from __future__ import annotations

import ctypes
import itertools
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alignedserve import fallbacks
from alignedserve.kernels import build
from alignedserve.kernels.build import LIBRARY, ONCE, SOURCES, X86, NoCompiler, find_compiler, sources, used_here
from alignedserve.kernels.dispatch import dispatcher
from alignedserve.kernels.library import Library, NoLibrary, lacked_set, usable_sets

built = pytest.mark.skipif(not LIBRARY.exists(), reason="the library was not built")


def test_where_there_is_a_compiler_the_other_tests_try_what_it_made() -> None:
    try:
        find_compiler()
    except NoCompiler as lack:
        pytest.skip(str(lack))
    assert "generic" in usable_sets(), "python -m alignedserve.kernels.build"


@built
def test_a_library_of_other_sources_is_not_used(tmp_path: Path) -> None:
    """The kernels of another library might take other arguments."""
    stale = tmp_path / LIBRARY.name
    stale.write_bytes(LIBRARY.read_bytes().replace(sources().encode(), b"0123456789abcdef"))
    with pytest.raises(NoLibrary, match=r"other sources than these: `python -m alignedserve\.kernels\.build`"):
        Library(path=stale)
    shutil.copy(LIBRARY, stale.with_name("copied.so"))
    assert Library(path=stale.with_name("copied.so")).usable == ", ".join(usable_sets())


def test_why_there_is_no_library_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NoLibrary, match=r"was not built: install a C\+\+ compiler and AlignedServe again"):
        Library(path=tmp_path / "absent.so")
    (tmp_path / "broken.so").write_text("not a library")
    with pytest.raises(NoLibrary, match="does not load"):
        Library(path=tmp_path / "broken.so")


@built
def test_an_instruction_set_or_a_kernel_that_is_not_there() -> None:
    with pytest.raises(NoLibrary, match="sse9 is not among those usable here: generic"):
        Library("sse9")
    with pytest.raises(NoLibrary, match="no kernel make_tea"):
        Library().kernel("make_tea")


def _library_of(tmp_path: Path, *sets: str) -> Path:
    """Build a library that has these instruction sets, and no kernels."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    (tmp_path / "built_for.h").write_text("".join(f"BUILT_FOR({isa})\n" for isa in sets))
    (tmp_path / "built_from.h").write_text(f'#define BUILT_FROM "{sources()}"\n')
    kernels = "".join(f"namespace {isa} {{ void* kernel(const char*) {{ return nullptr; }} }}\n" for isa in sets)
    (tmp_path / "kernels.cpp").write_text(kernels)
    library, compiled = tmp_path / "library.so", [str(SOURCES / ONCE), str(tmp_path / "kernels.cpp")]
    subprocess.run(["g++", "-shared", "-fPIC", f"-I{tmp_path}", *compiled, "-o", str(library)], check=True)
    return library


# What /proc/cpuinfo calls each set beyond those before it. Not every system lets its processes use AMX.
FLAGS = {
    "generic": set[str](),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512vnni": {"avx512_vnni"},
    "avx512bf16": {"avx512_bf16"},
}


def test_what_this_cpu_has_is_usable_and_nothing_else(tmp_path: Path) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set[str]()
    if "sse2" not in flags or not shutil.which("g++"):
        pytest.skip("needs an x86 CPU that Linux describes, and g++")
    library = _library_of(tmp_path, *X86)
    as_usable = ctypes.CDLL(str(library)).as_usable
    as_usable.restype = ctypes.c_char_p
    usable = as_usable().decode().split()
    has = list(itertools.takewhile(lambda isa: flags >= FLAGS[isa], FLAGS))
    assert [isa for isa in usable if isa != "amx"] == has
    assert "amx" not in usable or {"amx_tile", "amx_bf16"} <= flags


@built
def test_a_library_that_was_built_for_another_cpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, on the least that all CPUs have: nobody would know why it is slow."""
    best, library = usable_sets()[-1], _library_of(tmp_path, "generic")
    if best == "generic":
        pytest.skip("this CPU has nothing better")
    assert lacked_set() is None
    assert lacked_set(library) == best
    monkeypatch.setattr(fallbacks, "_found", {})
    monkeypatch.setattr(dispatcher, "lacked_set", lambda: lacked_set(library))
    monkeypatch.setattr(dispatcher, "Library", lambda _: Library("generic"))
    assert dispatcher.choose(torch.device("cpu"), torch.float32).kernels.name == "C++, generic"
    (told,) = fallbacks.fallbacks()
    assert (told.what, told.instead) == (f"C++ kernels for {best}", "those for generic take their place")
    assert "built for another CPU: `python -m alignedserve.kernels.build` builds them for this one" in told.why


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a compiler that compiles nothing, on a CPU with AVX-512 and VNNI."""
    has = "".join(f"echo '#define {macro} 1';" for macro in ("__AVX2__", "__AVX512BW__", "__AVX512VNNI__"))
    script = f'case "$*" in *-dM*) {has} exit;; esac\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    (tmp_path / "c++").write_text(f"#!/bin/sh\n{script}")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))


@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="there is one set on this kind of machine")
@pytest.mark.parametrize(
    ("asked", "sets"),
    [(None, "generic avx512vnni"), ("here", "generic avx512vnni"), ("all", " ".join(X86)), ("none", ""), ("amd", None)],
)
def test_installing_from_source_builds_what_this_cpu_runs(
    asked: str | None, sets: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels for all CPUs took more than ten minutes, without a word. Who makes a wheel for others says so."""
    monkeypatch.delenv("CPU_KERNELS", raising=False)
    if asked is not None:
        monkeypatch.setenv("CPU_KERNELS", asked)
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    command = [sys.executable, "setup.py", "build_ext", *folders]
    done = subprocess.run(command, cwd=SOURCES.parents[1], capture_output=True, text=True, check=False)
    library = tmp_path / "lib" / "alignedserve" / "kernels" / LIBRARY.name
    if sets is None:
        assert done.returncode == 1
        assert "CPU_KERNELS is 'amd': set it to here, all or none" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert library.exists() == bool(sets)
    if sets:
        assert re.search(r"^C\+\+ kernels: (\d+) of \1 files compiled in \d+ s$", done.stdout, re.M)
        assert f"for {sets}, with" in done.stdout


def test_the_named_compiler_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("clang++", "ccache"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "ccache clang++ -m64")
    assert find_compiler() == ["ccache", "clang++", "-m64"]
    monkeypatch.setenv("CXX", "")
    assert find_compiler() == [str(tmp_path / "clang++")]
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(NoCompiler, match="CXX names /nonexistent, which is not there"):
        find_compiler()


def test_of_the_sets_that_are_built_a_machine_uses_the_best() -> None:
    try:
        used = used_here(find_compiler(), list(X86))
    except NoCompiler as lack:
        pytest.skip(str(lack))
    assert used[0] == "generic"
    assert set(usable_sets()[-1:]) <= set(used)
    assert used_here(["/bin/false"], ["generic", "avx2"]) == ["generic", "avx2"], "this compiler does not say"


def test_amx_is_built_beside_the_next_best() -> None:
    def used(*macros: str) -> list[str]:
        said = "".join(f"echo '#define {macro} 1';" for macro in macros)
        return used_here(["/bin/sh", "-c", said], list(X86))

    assert used("__AVX2__", "__AVX512BW__") == ["generic", "avx512"]
    assert used("__AVX2__", "__AMX_BF16__") == ["generic", "avx2", "amx"]


def test_what_a_compiler_fails_with_is_one_line() -> None:
    with pytest.raises(build.BuildFailed, match=r"^/bin/sh failed: error: no memory$"):
        build._run(["/bin/sh", "-c", "echo a warning >&2; echo error: no memory >&2; exit 1"])


def test_building_without_a_compiler_fails_unless_it_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    for flags, status in ((["--optional"], 0), ([], 1)):
        command = [sys.executable, "-m", "alignedserve.kernels.build", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status
        (line,) = (done.stdout + done.stderr).splitlines()
        assert line.startswith("no C++ compiler found: ")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="there is one set on this kind of machine")
def test_what_would_not_compile_for_another_cpu_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        find_compiler()
    except NoCompiler as lack:
        pytest.skip(str(lack))
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "run_here", lambda _compiler, sets: [isa for isa in sets if isa == "generic"])
    (tmp_path / "sum.cpp").write_text("int here;\n")
    assert build.try_elsewhere().startswith("compiled, and not kept: ")
    (tmp_path / "sum.cpp").write_text("#ifdef __AVX512VNNI__\n#error no sums\n#endif\n")
    with pytest.raises(build.BuildFailed, match="no sums"):
        build.try_elsewhere()


@built
@pytest.mark.skipif(not shutil.which("nm"), reason="there is no nm here")
def test_no_code_is_shared_between_instruction_sets() -> None:
    """The linker keeps only one instance of a template: an instance of a newer instruction set would crash older
    CPUs."""
    symbols = subprocess.run(["nm", "-C", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"^\S+ [tTwW] (.+)$", symbols, re.MULTILINE)
    own = re.compile(rf"\b({'|'.join(X86)})::")
    assert len([name for name in functions if own.search(name)]) > len(X86)
    assert [name for name in functions if "::" in name and not own.search(name)] == []
