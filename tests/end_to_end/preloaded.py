"""Launchers of test deployments, forked from one process that has loaded what all their parts need.

A deployment that a test starts so takes the processor for about a second: nothing is imported. Its launcher, fork
servers and parts are those of `alignedserve serve`. What changes imports, such as another path of Python, or what is
about the start itself, is started by a command, as users do.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from alignedserve.launch.fork_server import ForkServer, adopt_orphans, rename, serve

MARK = "ALIGNED_E2E_DEPLOYMENT"  # set in the environment of all that a deployment starts
_NO_MARK = "0" * 32  # as long as every mark, and replaced by one
_LOOK_S = 0.02
_PATHS = ("PATH", "PYTHONPATH", "LD_PRELOAD")  # what is loaded, and compiled, depends on them
_LOADED = {name: os.environ.get(name) for name in _PATHS}


def is_loaded(environment: Mapping[str, str]) -> bool:
    """Return whether a deployment with these variables would load what this process has loaded."""
    return {name: environment.get(name, os.environ.get(name)) for name in _PATHS} == _LOADED


class PreloadedLauncher:
    """A launcher, with what tests use of subprocess.Popen."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        mark: str,
        stderr: int,
        typed_in: Path | None,
        plant: str,
    ) -> None:
        reads, writes = os.pipe()
        given = {"arguments": arguments, "environment": dict(environment), "mark": mark, "plant": plant}
        request = json.dumps(given | {"typed_in": str(typed_in or os.getcwd())})
        with open(os.devnull, "rb") as nothing:
            try:
                self.pid = _server().fork_with(request, (nothing.fileno(), writes, stderr))
            finally:
                os.close(writes)
        self.stdout = os.fdopen(reads, "rb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("alignedserve serve", timeout)
            time.sleep(_LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> ForkServer:
    """Start the process that forks launchers. It ends with this one."""
    assert adopt_orphans()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.end_to_end.preloaded", str(theirs.fileno()), str(os.getpid())]
    environment = {**os.environ, MARK: _NO_MARK, "PYTHONFAULTHANDLER": "1"}
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    return ForkServer(process.pid, ours)


# --- The process that forks launchers


def _load() -> None:
    import alignedserve.__main__
    import alignedserve.cli.main
    import alignedserve.launch.launch  # noqa: F401
    from alignedserve.core import Role
    from alignedserve.launch import start

    start.load([*Role])


def _launch(request: str) -> int:
    """Become `alignedserve serve`."""
    given = json.loads(request)
    rename("alignedserve: launcher")
    _mark_as(given["mark"])
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["typed_in"])
    exec(given["plant"], {})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["alignedserve", *given["arguments"]]
    from alignedserve.__main__ import main

    return main()


def _mark_as(mark: str) -> None:
    """Write the mark where the kernel shows the environment with which this process began."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    at = start + ctypes.string_at(start, end - start).index(f"{MARK}={_NO_MARK}".encode())
    ctypes.memmove(at, f"{MARK}={mark}".encode(), len(MARK) + 1 + len(_NO_MARK))


if __name__ == "__main__":
    link = socket.socket(fileno=int(sys.argv[1]))
    sys.exit(serve(link, int(sys.argv[2]), "alignedserve: launchers of tests", _load, _launch))
