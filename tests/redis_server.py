"""Private Redis servers for the tests, each on a socket in a folder, removed with the test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

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
        at = self._folder / "socket"
        at.unlink(missing_ok=True)
        where = ["--port", "0", "--unixsocket", str(at), "--dir", str(self._folder), "--save", ""]
        kept = ["--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen(
            [program, *where, *kept, *self._options], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_S
        while not at.exists():
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline, "redis-server does not start"
            time.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class RedisTrio:
    """A master and two replicas that three Sentinels watch; they choose another master within about five seconds."""

    SERVICE = "jobs"

    def __init__(self, folder: Path) -> None:
        program, env = _program()
        self._env = env
        ports = free_ports(6)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.servers, self.sentinels = ports[:3], ports[3:]
        for port in self.servers:
            of = [] if port == self.servers[0] else ["--replicaof", f"127.0.0.1 {self.servers[0]}"]
            self._start(folder, program, port, "--save", "", "--repl-diskless-sync-delay", "0", *of)
        for port in self.sentinels:
            conf = folder / f"{port}.conf"
            conf.write_text(
                f"sentinel monitor {self.SERVICE} 127.0.0.1 {self.servers[0]} 2\n"
                f"sentinel down-after-milliseconds {self.SERVICE} 2000\n"
                f"sentinel failover-timeout {self.SERVICE} 10000\n"
            )
            self._start(folder, program, port, conf=conf)
        self._wait_until_they_know_each_other()
        self.url = f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.sentinels)}/{self.SERVICE}/0"

    def _wait_until_they_know_each_other(self) -> None:
        deadline = time.monotonic() + _START_S
        while any(self._known_to(port) != (2, 2) for port in self.sentinels):
            assert time.monotonic() < deadline, "the Sentinels do not find each other"
            time.sleep(0.05)

    def _known_to(self, port: int) -> tuple[int, int]:
        """Return how many replicas and other Sentinels a Sentinel knows."""
        try:
            with redis.Redis(port=port) as client:
                known: Any = client.sentinel_master(self.SERVICE)
        except redis.ConnectionError:
            return 0, 0
        return known["num-slaves"], known["num-other-sentinels"]

    def _start(self, folder: Path, program: str, port: int, *options: str, conf: Path | None = None) -> None:
        own = folder / str(port)
        own.mkdir()
        command = [program, *([str(conf), "--sentinel"] if conf else [])]
        command += ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(own), *options]
        self._processes[port] = subprocess.Popen(
            command, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self, *ports: int) -> None:
        for port in ports or list(self._processes):
            process = self._processes.pop(port)
            process.kill()
            process.wait()

    @contextmanager
    def stopped(self, port: int) -> Iterator[None]:
        """Stop a server, which keeps its connections, until the end."""
        self._processes[port].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._processes[port].send_signal(signal.SIGCONT)


def free_ports(count: int) -> list[int]:
    """Return ports that are free now; none of them is given twice."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


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
