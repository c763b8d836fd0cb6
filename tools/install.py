"""Install packages into this Python's environment: by uv, which takes a third of pip's time, or by pip if uv fails.

    .venv/bin/python tools/install.py torch==2.13.0 --editable .
    .venv/bin/python tools/install.py --lock dev.txt torch==2.13.0 --editable '.[dev]'

The second installs torch, the packages of a lock and this project, each file by its hash (deploy/locks). If that fails
nothing else is installed. With UNLOCKED=1, and on Python 3.10, which the locks do not fit, what follows the lock is
installed then, in the newest versions and without hashes; with LOCKED=1, as in CI, never.

uv is taken from the path, or fetched by pip into the environment. It does not read pip's configuration, so it is given
the indexes, folders of wheels and certificates that pip is configured with: both find the same packages. The kernels
have a build of their own (kernels/build.py), which can run at the same time.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
INSTALL = (*PIP, "--quiet", "install")
LOCKS = Path(__file__).resolve().parents[1] / "deploy" / "locks"
LEAST_PYTHON = (3, 11)  # of the locks
# uv's flag for each setting of pip that names a place; a setting may hold several values.
FLAGS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}


def pip_lists() -> str:
    """Return what pip is configured with. With --quiet it would print nothing."""
    return subprocess.run([*PIP, "config", "list"], check=False, capture_output=True, text=True).stdout


def pip_settings(listed: str) -> dict[str, str]:
    """Return pip's settings by name from what `pip config list` prints; variables overrule files, as for pip."""
    found = {}
    for line in listed.splitlines():
        place, _, value = line.partition("=")
        section, _, name = place.rpartition(".")
        if value and (name not in found or section == ":env:"):
            found[name] = str(ast.literal_eval(value))
    return found


def uv_arguments(settings: dict[str, str]) -> Iterator[str]:
    """Yield the arguments that make uv look where pip looks, and take the newest version of all places as pip does."""
    yield from ("--index-strategy", "unsafe-best-match")
    for name, flag in FLAGS.items():
        for value in settings.get(name, "").split():
            yield from (flag, value)
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        yield "--no-index"


def find_uv() -> str | None:
    """Return uv's path, after pip has installed uv by its lock if it was missing, or None if pip cannot install it."""
    beside = Path(sys.executable).with_name("uv")
    if found := shutil.which("uv"):
        return found
    if not beside.exists():
        subprocess.run([*INSTALL, *by_hash("build.txt")], check=False, capture_output=True)
    return str(beside) if beside.exists() else None


def install_by_uv(wanted: list[str]) -> bool:
    """Install the packages by uv; return whether it could."""
    uv = find_uv()
    if uv is None:
        return False
    settings = pip_settings(pip_lists())
    certificates = {"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {}
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, *uv_arguments(settings), *wanted]
    return subprocess.run(command, check=False, env=certificates | dict(os.environ)).returncode == 0


def install(wanted: Sequence[str]) -> bool:
    """Install the packages by uv, or by pip if uv fails; return whether one could."""
    if install_by_uv([*wanted]):
        return True
    print("uv could not install the packages: installing them by pip", file=sys.stderr)
    return subprocess.run([*INSTALL, *wanted], check=False).returncode == 0


def by_hash(lock: str) -> list[str]:
    """Return the arguments that install a lock and nothing else."""
    return ["--no-deps", "--require-hashes", "--requirement", str(LOCKS / lock)]


def install_locked(lock: str) -> bool:
    """Install torch, the packages of the lock, and this project; return whether all were there with their hashes.

    torch comes first, in its build for CPUs if pip is configured with a place that has it, else in that of the public
    index, with CUDA. The project is built by the lock's setuptools, not by the newest."""
    if sys.version_info < LEAST_PYTHON:
        print(f"the locks are for Python {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} and later", file=sys.stderr)
        return False
    return (
        any(install(by_hash(build)) for build in ("torch-cpu.txt", "torch-cuda.txt"))
        and install(by_hash(lock))
        and install(["--no-deps", "--no-build-isolation", "--editable", str(LOCKS.parents[1])])
    )


def main(arguments: list[str]) -> int:
    os.environ["CPU_KERNELS"] = "none"  # `make` builds them meanwhile
    lock, *wanted = arguments[1:] if arguments[0] == "--lock" else ("", *arguments)
    if lock:
        if install_locked(lock):
            return 0
        may_be_newer = os.environ.get("UNLOCKED") or sys.version_info < LEAST_PYTHON
        if os.environ.get("LOCKED") or not may_be_newer:
            said = "the newest versions, without hashes, are installed only with UNLOCKED=1"
            print(f"deploy/locks/{lock} or torch's lock did not install (above): {said}", file=sys.stderr)
            return 1
        print(f"deploy/locks/{lock} did not install: the newest versions are installed", file=sys.stderr)
    return 0 if install(wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
