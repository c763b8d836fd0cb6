"""Private Redis servers for the tests, each on a socket in a folder, removed with the test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.gateway.test_certificate import PEMS

_UNPACKED = Path(__file__).resolve().parents[1] / "build" / "redis" / "usr"
_START_S = 120.0
_REPLICATED = ("--save", "", "--repl-diskless-sync-delay", "0")
PEM = PEMS / "first.pem"  # certificate and key
_FILES = f"--tls-cert-file {PEM} --tls-key-file {PEM} --tls-ca-cert-file {PEM} --tls-auth-clients no".split()


def tls_options(port: int) -> list[str]:
    """Return the options of a server that speaks TLS at the port, and to other servers."""
    return ["--tls-port", str(port), *_FILES, "--tls-replication", "yes"]


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

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Have it forget all that it has."""
        with redis.Redis(unix_socket_path=str(self._folder / "socket")) as client:
            client.flushall()

    def cut_log(self, num_bytes: int) -> None:
        """Cut the end of the log of a server that was killed, as a disk does that did not keep what was synced."""
        logs = [path for path in self._folder.rglob("*.aof") if ".incr." in path.name or "." not in path.stem]
        log = max(logs, key=lambda path: path.stat().st_mtime_ns)
        os.truncate(log, max(0, log.stat().st_size - num_bytes))


class Servers:
    """A master, two replicas and others, each at a port. They choose another master within about five seconds."""

    def __init__(self, folder: Path, is_tls: bool = False) -> None:
        self._folder, self._is_tls = folder, is_tls
        self._program, self._env = _program()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.servers: list[int] = []  # the master, its replicas
        self.url = ""
        self.refused: list[str] = []  # addresses with a wrong password for Sentinels

    def _start(self, port: int, *options: str, conf: Path | None = None) -> None:
        own = self._folder / str(port)
        own.mkdir()
        command = [self._program, *([str(conf), "--sentinel"] if conf else [])]
        command += ["--port", "0", *tls_options(port)] if self._is_tls else ["--port", str(port)]
        command += ["--bind", "127.0.0.1", "--dir", str(own), *options]
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


class RedisTrio(Servers):
    """A master and two replicas that three Sentinels watch. With passwords, an address first names a server that takes
    another one, as a Sentinel whose password was changed."""

    SERVICE = "jobs"

    def __init__(self, folder: Path, is_tls: bool = False, password: str = "", sentinel_password: str = "") -> None:
        super().__init__(folder, is_tls)
        ports = free_ports(7)
        self.servers, self.sentinels, changed = ports[:3], ports[3:6], ports[6:]
        self._sentinel_password = sentinel_password or None
        login = ["--requirepass", password, "--masterauth", password] if password else []
        for port in self.servers:
            of = [] if port == self.servers[0] else ["--replicaof", f"127.0.0.1 {self.servers[0]}"]
            self._start(port, *_REPLICATED, *of, *login)
        for port in self.sentinels:
            conf = folder / f"{port}.conf"
            conf.write_text(
                f"sentinel monitor {self.SERVICE} 127.0.0.1 {self.servers[0]} 2\n"
                f"sentinel down-after-milliseconds {self.SERVICE} 2000\n"
                f"sentinel failover-timeout {self.SERVICE} 10000\n"
                + (f"sentinel auth-pass {self.SERVICE} {password}\n" if password else "")
                + (f"requirepass {sentinel_password}\n" if sentinel_password else "")
            )
            self._start(port, conf=conf)
        _wait_until(
            "the Sentinels find each other", lambda: {self._known_to(port) for port in self.sentinels} == {(2, 2)}
        )
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        login, options = "", [f"ssl_ca_certs={PEM}"] if is_tls else []
        scheme = "rediss" if is_tls else "redis"
        if password:
            self._start(changed[0], "--requirepass", "other")
            login, hosts = f":{password}@", f"127.0.0.1:{changed[0]},{hosts}"
        without = f"{scheme}+sentinel://{login}{hosts}/{self.SERVICE}/0?{'&'.join(options)}"
        self.url = f"{without}&sentinel_password={sentinel_password}" if password else without
        self.refused = [without, f"{without}&sentinel_password=wr0ng"] if password else []

    def _known_to(self, port: int) -> tuple[int, int]:
        """Return how many replicas and other Sentinels a Sentinel knows."""
        try:
            with redis.Redis(
                port=port, password=self._sentinel_password, ssl=self._is_tls, ssl_cert_reqs="none"
            ) as client:
                known: Any = client.sentinel_master(self.SERVICE)
        except redis.ConnectionError:
            return 0, 0
        return known["num-slaves"], known["num-other-sentinels"]


class RedisCluster(Servers):
    """A cluster of three masters: the first has two replicas and nearly all slots, the second has one replica."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        ports = free_ports(6, with_bus=True)
        self.servers, (self.other, replica, third) = ports[:3], ports[3:]
        masters = {self.servers[0]: range(200, 16_384), self.other: range(100), third: range(100, 200)}
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-migration-barrier", "9")
        for port in ports:
            self._start(port, *_REPLICATED, *options)
        _wait_until("all servers answer", lambda: all(self._answers(port) for port in ports))
        for port in ports:
            self.ask(port, "MEET", "127.0.0.1", ports[0])
        for port, slots in masters.items():
            self.ask(port, "ADDSLOTS", *slots)
        _wait_until("all servers know each other", lambda: all("cluster_known_nodes:6" in self._info(p) for p in ports))
        for port, of in ((self.servers[1], ports[0]), (self.servers[2], ports[0]), (replica, self.other)):
            self.ask(port, "REPLICATE", self.ask(of, "MYID"))
        _wait_until("the cluster is whole", lambda: all("cluster_state:ok" in self._info(port) for port in ports))
        self.url = f"redis+cluster://127.0.0.1:{self.other},127.0.0.1:{third}"

    def ask(self, port: int, *words: Any) -> Any:
        with redis.Redis(port=port, decode_responses=True) as client:
            return client.execute_command("CLUSTER", *words)

    def _info(self, port: int) -> str:
        return str(self.ask(port, "INFO"))

    def _answers(self, port: int) -> bool:
        with suppress(redis.ConnectionError):
            return bool(self._info(port))
        return False

    def move_slot(self, slot: int) -> Iterator[None]:
        """Move a slot from the first master to the second, a key at each step."""
        old, new = self.servers[0], self.other
        old_id, new_id = self.ask(old, "MYID"), self.ask(new, "MYID")
        self.ask(new, "SETSLOT", slot, "IMPORTING", old_id)
        self.ask(old, "SETSLOT", slot, "MIGRATING", new_id)
        while keys := self.ask(old, "GETKEYSINSLOT", slot, 1):
            yield
            with redis.Redis(port=old) as client:
                client.migrate("127.0.0.1", new, keys, 0, 5_000)
        yield
        for port in (new, old):
            self.ask(port, "SETSLOT", slot, "NODE", new_id)


_LOGINS = {"password": "s3cret", "sentinel_password": "wh1sper"}
PASSWORDS = "|".join(_LOGINS.values())
REPLICATED: dict[str, Callable[[Path], Servers]] = {
    "sentinels": RedisTrio,
    "sentinels with TLS and passwords": partial(RedisTrio, is_tls=True, **_LOGINS),
    "cluster": RedisCluster,
}


def _wait_until(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not is_so():
        assert time.monotonic() < deadline, f"it is not so that {what}"
        time.sleep(0.05)


def free_ports(count: int, with_bus: bool = False) -> list[int]:
    """Return ports that are free now; none of them is given twice. Servers of a cluster also need 10,000 above each."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            first, bus = (stack.enter_context(socket.socket()) for _ in range(2))
            with suppress(OSError, OverflowError):
                first.bind(("127.0.0.1", 0))
                port = first.getsockname()[1]
                if with_bus:
                    bus.bind(("127.0.0.1", port + 10_000))
                found.append(port)
    return found


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
