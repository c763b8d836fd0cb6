"""Private Redis servers for the tests, each on a socket in a folder, removed with the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

_UNPACKED = Path(__file__).resolve().parents[1] / "build" / "redis" / "usr"
_START_S = 120.0


class RedisServer:
    """Redis server that can be killed and started again: what it has acknowledged is in its folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options = folder, options
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder / 'socket'}"
        self.start()

    def start(self) -> None:
        program, env = _program()
        socket = self._folder / "socket"
        socket.unlink(missing_ok=True)
        where = ["--port", "0", "--unixsocket", str(socket), "--dir", str(self._folder), "--save", ""]
        kept = ["--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen(
            [program, *where, *kept, *self._options], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_S
        while not socket.exists():
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline, "redis-server does not start"
            time.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def _program() -> tuple[str, dict[str, str]]:
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    if found := shutil.which("redis-server"):
        return found, env
    unpacked = _UNPACKED / "bin" / "redis-server"
    if unpacked.exists():
        libraries = ":".join(map(str, (_UNPACKED / "lib").glob("*-linux-gnu")))
        return str(unpacked), env | {"LD_LIBRARY_PATH": libraries}
    why = "there is no redis-server: `make redis` gets Debian's where apt-get may"
    if os.environ.get("ALIGNED_TESTS_NEED_REDIS"):
        pytest.fail(why)
    pytest.skip(why)
