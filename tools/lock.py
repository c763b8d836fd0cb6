"""Lock the packages that images and CI install: each by its version and the hashes of its files.

    .venv/bin/python tools/lock.py  # takes the newest versions that go together, into deploy/locks

torch and the CUDA libraries that it brings are left out: it has builds of its own for CPUs, so it is installed before,
in the version that the Makefile says.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence, Set
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from install import find_uv, pip_lists, pip_settings, uv_arguments

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
LEFT_OUT = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
IMAGE = ("--python-version", "3.12", "--python-platform", "x86_64-unknown-linux-gnu")
EXTRAS = {"serve.txt": ("ray", "redis"), "dev.txt": ("dev",)}
OF = {"serve.txt": IMAGE, "dev.txt": ("--universal", "--python-version", "3.11")}
HEADER = "# By `python tools/lock.py`, with the hashes of every file of each version.\n"
_ENTRY = re.compile(r"^\S+==.*\n(?: .*\n)*", re.M)
_LOCKED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)(?: ;.*?)? \\$", re.M)


def lock(name: str, uv: str) -> None:
    """Write one lock."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as bounds:
        bounds.write(f"{torch()}\n")
        bounds.flush()
        extras = [word for extra in EXTRAS[name] for word in ("--extra", extra)]
        command = [uv, "pip", "compile", "--quiet", "--upgrade", "--generate-hashes", "--no-header", "--no-annotate"]
        command += [*uv_arguments(pip_settings(pip_lists())), *OF[name], *extras, "--constraint", bounds.name]
        made = subprocess.run([*command, "pyproject.toml"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    asked = {_plain(wanted.name) for wanted in _wanted(EXTRAS[name])} - {"torch"}
    kept = [entry for entry in entries(made.stdout) if _is_kept(entry, asked)]
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
    for name, version in _LOCKED.findall(text):
        found.setdefault(_plain(name), []).append(version)
    return found


def missing(name: str) -> Iterator[str]:
    """Yield what the project asks for, and this lock has not."""
    versions = locked((LOCKS / name).read_text(encoding="utf-8"))
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
    for name in EXTRAS:
        lock(name, uv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
