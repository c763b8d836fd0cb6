"""Lock the packages that CI, images and `make serve` install: each by its version and the hashes of its files.

    .venv/bin/python tools/lock.py         # takes the newest versions that go together, into deploy/locks
    .venv/bin/python tools/lock.py --keep  # what pyproject.toml asks for beside the versions that the locks have

torch is left out of the locks of packages, since it has a build of its own for CPUs. torch-cuda.txt has the public
index's build with the CUDA libraries that it brings; torch-cpu.txt has the files of download.pytorch.org/whl/cpu and is
kept by hand, since uv asks no index for the hashes of files that this Python cannot install.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence, Set
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from install import find_uv, pip_lists, pip_settings, uv_arguments

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
LEFT_OUT = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
EXTRAS: dict[str, tuple[str, ...]] = {  # of each lock
    "dev.txt": ("dev",),
    "serve.txt": (),
    "image.txt": ("ray", "redis"),
    "image-cuda.txt": ("flash",),
}
# The locks that an image installs too: these have only what their extras bring beside them.
BESIDE: dict[str, tuple[str, ...]] = {"image.txt": ("serve.txt",), "image-cuda.txt": ("serve.txt", "image.txt")}
# Tools: what installs and builds the others, and what asks whether a locked version has a known vulnerability.
TOOLS = {"build.txt": ("uv", "setuptools>=77"), "audit.txt": ("pip-audit",)}
HEADER = "# By `python tools/lock.py`, with the hashes of every file of each version.\n"
_ENTRY = re.compile(r"^\S+==.*\n(?: .*\n)*", re.M)
_LOCKED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)( ;.*?)? \\$", re.M)


def lock(name: str, uv: str, beside: Collection[str]) -> None:
    """Write one lock of the project's packages, in versions that go with the locks `beside`."""
    extras = [word for extra in EXTRAS[name] for word in ("--extra", extra)]
    made = _compiled(uv, [*extras, "pyproject.toml"], [torch(), *_versions(beside)])
    asked = {_plain(wanted.name) for wanted in _wanted(EXTRAS[name])} - {"torch"}
    kept = [entry for entry in entries(made) if _is_kept(entry, asked)]
    had = locked(_texts(BESIDE.get(name, ())))
    _write(name, [entry for entry in kept if _plain(entry.partition("==")[0]) not in had])


def lock_tools(name: str, uv: str, beside: Collection[str]) -> None:
    """Write a lock of tools."""
    _write(name, entries(_of_lines(uv, TOOLS[name], _versions(beside))))


def lock_cuda(uv: str) -> None:
    """Write the lock of torch's build with CUDA."""
    made = entries(_of_lines(uv, [torch()], ()))
    _write("torch-cuda.txt", [entry for entry in made if LEFT_OUT.fullmatch(_plain(entry.partition("==")[0]))])


def _of_lines(uv: str, wanted: Sequence[str], bounds: Sequence[str]) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".in") as asked:
        asked.write("\n".join(wanted))
        asked.flush()
        return _compiled(uv, [asked.name], bounds)


def _compiled(uv: str, wanted: Sequence[str], bounds: Sequence[str]) -> str:
    """Return what uv makes of these requirements, for every system and each Python from 3.11 on.

    It asks the index alone. A folder or a second index of this machine may have the one file of a version that fits
    this Python, and a lock with that hash alone would install nowhere else."""
    asked = {name: value for name, value in pip_settings(pip_lists()).items() if name in ("index-url", "trusted-host")}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(bounds))
        constraints.flush()
        command = [uv, "pip", "compile", "--quiet", "--upgrade", "--generate-hashes", "--no-header", "--no-annotate"]
        command += [*uv_arguments(asked), "--universal", "--python-version", "3.11"]
        command += ["--constraint", constraints.name, *wanted]
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def _versions(names: Collection[str]) -> list[str]:
    """Return each version that these locks have, with the Pythons and systems that it is for."""
    return [f"{package}=={version}{marker}" for package, version, marker in _LOCKED.findall(_texts(names))]


def _texts(names: Collection[str]) -> str:
    return "".join((LOCKS / name).read_text(encoding="utf-8") for name in names)


def _write(name: str, kept: Sequence[str]) -> None:
    (LOCKS / name).write_text(HEADER + "".join(kept), encoding="utf-8")


def torch() -> str:
    """Return the requirement of torch that the Makefile has."""
    found = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert found is not None, "the Makefile says no version of torch"
    return found[1]


def _is_kept(entry: str, asked: Set[str]) -> bool:
    name = _plain(entry.partition("==")[0])
    return name in asked or not LEFT_OUT.fullmatch(name)


def entries(text: str) -> list[str]:
    """Return the lines of each version that a lock has."""
    return _ENTRY.findall(text)


def locked(text: str) -> dict[str, list[str]]:
    """Return the versions of each package in a lock; there are several where Python versions need others."""
    found: dict[str, list[str]] = {}
    for name, version, _ in _LOCKED.findall(text):
        found.setdefault(_plain(name), []).append(version)
    return found


def missing(name: str) -> Iterator[str]:
    """Yield what the project asks for, and this lock has not."""
    versions = locked(_texts((name, *BESIDE.get(name, ()))))
    for wanted in _wanted(EXTRAS[name]):
        is_met = any(wanted.specifier.contains(version) for version in versions.get(_plain(wanted.name), ()))
        if not is_met and _plain(wanted.name) != "torch":
            yield str(wanted)


def _wanted(extras: Sequence[str]) -> Iterator[Requirement]:
    for wanted in map(Requirement, requires("alignedserve") or ()):
        if not any(wanted.marker is None or wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        if wanted.name == "alignedserve":
            yield from _wanted(sorted(wanted.extras))
        else:
            yield wanted


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    uv = find_uv()
    if uv is None:
        print("no uv: pip install uv", file=sys.stderr)
        return 1
    is_kept = "--keep" in sys.argv[1:]
    for name in EXTRAS:
        had = {name} if is_kept and (LOCKS / name).exists() else set()
        lock(name, uv, had if name == "dev.txt" else {"dev.txt", *had})
    for name in TOOLS:
        lock_tools(name, uv, ["serve.txt"] if name == "build.txt" else ())
    lock_cuda(uv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
