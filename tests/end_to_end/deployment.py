"""A deployment that a test starts, queries, wounds and stops from outside, as a user would.

After its end, the test searches for what it may have left: processes by a mark in their
environment, its port, and files in a shared-memory folder of its own.
"""

from __future__ import annotations

import itertools
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any
from uuid import uuid4

import httpx

from alignedserve.architectures.model_source import DEMO_FOLDER
from tests.conftest import SOAK
from tests.end_to_end.preloaded import MARK as MARK
from tests.end_to_end.preloaded import PreloadedLauncher, is_loaded

MODEL = DEMO_FOLDER
NAME = "demo"  # the model's name in the API

TOPOLOGIES = ("colocated", "1+1")
LAUNCHERS = ("local", "ray")

IPAddress = IPv4Address | IPv6Address
Kind = tuple[str, str]  # kind of deployment: topology, launcher
KINDS: list[Kind] = list(itertools.product(TOPOLOGIES, LAUNCHERS))
LOCAL: list[Kind] = [(topology, "local") for topology in TOPOLOGIES]
# Ray takes seconds to start: tests/cluster/test_nodes.py has one deployment on it in each run, for what can fail there.
NONE_ON_RAY = KINDS if SOAK else LOCAL

# These limits hold on a slow and shared machine too; a wait in vain still fails.
START_S = 300.0
STOP_S = 180.0
BACK_S = 240.0  # for a part that was killed, added or removed, until the deployment is in order again
GONE_S = 90.0  # for all processes and files to disappear after a deployment has ended
ANSWER_S = 300.0
STACKS_S = 5.0  # for the stacks of a launcher that does not end to be written
LOOK_S = 0.1  # each look at all processes, or at the gateway, takes some milliseconds of what is waited for
_SERVE = ("serve", "--dtype", "float32", "--served-model-name", NAME)  # later arguments may say otherwise
# Workers that start do not measure steps and implementations first, each for seconds on all cores.
_UNMEASURED = ("--profile-s", "0", "--set", "engine.tune_s=0")
# A slow machine must not refuse requests here: tests/router covers refusals.
_REFUSES_NONE = ("--set", "schedule.refuse_ttfts=0")
_SIZES = ("--kv-memory-mb", "512", "--pool-memory-mb", "256")  # tests run side by side
_LOG_TAIL = 6_000
# One client for all questions: making a client takes ten times the processor time of a question. Each question has a
# connection of its own.
_HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0), verify=False)
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
# By default Ray ends actors when the machine is short of memory, even if other processes use it.
RAY_FOR_TESTS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
# Ray's logs: removed when the tests end.
_RAY_FILES = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
_PROFILES = tempfile.TemporaryDirectory(prefix="alignedserve-profiles-")  # all tests share one first start
_JOBS = tempfile.TemporaryDirectory(prefix="alignedserve-jobs-")  # holds a folder for each deployment


class Deployment:
    """`alignedserve serve` in a process of its own. `stop` ends it, or a test kills it.

    Its launcher is forked with everything loaded, and runs `plant` first: Python that puts a fault into the parts.
    On Ray and with `by_command` it is started as users do. With `measured` its workers measure steps first.
    Unless it `is_sized` its sizes follow the memory that is free."""

    def __init__(
        self,
        *flags: str,
        topology: str = "colocated",
        launcher: str = "local",
        model: Path = MODEL,
        memory: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        typed_in: Path | None = None,
        by_command: bool = False,
        plant: str = "",
        measured: bool = False,
        is_sized: bool = True,
    ) -> None:
        self.mark = uuid4().hex
        self.memory = memory
        self.began_at = time.monotonic()
        self._log = tempfile.NamedTemporaryFile(prefix="alignedserve-log-")  # noqa: SIM115  (closed by `forget`)
        given = ["--topology", topology, "--launcher", launcher, "--pool-directory", str(memory)]
        given += _SIZES if is_sized else []
        given += [] if measured else _UNMEASURED
        given += _REFUSES_NONE
        arguments: list[str | Path] = [model, "--port", "0", *given, *flags]
        options: dict[str, Any] = {"environment": environment, "typed_in": typed_in, "mark": self.mark}
        if launcher == "ray" or by_command:
            self._launch = partial(spawn, *arguments, stderr=self._log, **options)
        else:
            self._launch = partial(launch, *arguments, stderr=self._log, plant=plant, **options)
        self.process: subprocess.Popen[bytes] | PreloadedLauncher = self._launch()
        try:
            self.greeting = self._wait_until_it_serves()
        except BaseException:  # Ctrl-C too
            self.kill()
            raise
        self.url = re.findall(r"https?://[\d.]+:\d+", self.greeting)[0]
        self.ready_s = time.monotonic() - self.began_at

    def kill_launcher(self) -> None:
        self.process.kill()
        self.process.wait()

    def launch_again(self, *flags: str) -> None:
        """Start another launcher, with these flags besides, and wait until it says that it serves."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.began_at = time.monotonic()
        self.process = self._launch(*flags)
        self.greeting = self._wait_until_it_serves()

    def _wait_until_it_serves(self) -> str:
        read = b""
        while b"try: " not in read or not read.endswith(b"\n"):
            left_s = START_S - (time.monotonic() - self.began_at)
            assert self.process.stdout is not None
            there, _, _ = select.select([self.process.stdout], [], [], max(0, left_s))
            new = os.read(self.process.stdout.fileno(), 4096) if there else b""
            if not new:
                raise AssertionError(f"it does not serve; it said {read!r} and logged:\n{self.log()}")
            read += new
        return read.decode()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def whole_log(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def log(self) -> str:
        """Return the end of the log, to show what went wrong."""
        return self.whole_log()[-_LOG_TAIL:]

    def processes(self) -> dict[int, str]:
        """Return all living processes of the deployment: pid -> command line."""
        return marked(self.mark)

    def pid(self, part: str) -> int:
        """Return the pid of this part."""
        found = self._pids(part)
        assert len(found) == 1, f"{part} is not one process: {self.processes()}\n{self.log()}"
        return found[0]

    def runs(self, part: str) -> bool:
        return bool(self._pids(part))

    def _pids(self, part: str) -> list[int]:
        """Return the pids of this part."""
        return [pid for pid, command in self.processes().items() if part_of(command) == part]

    def wound(self, part: str) -> None:
        """Kill the process of this part, once it runs, and return when the launcher has started another for it."""
        there: list[int] = []

        def is_there() -> bool:
            there[:] = self._pids(part)
            return len(there) == 1

        wait_until(is_there, BACK_S, self.log)  # where others serve, a test before may not wait for it
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(there[0], signal.SIGKILL)
        wait_until(lambda: any(pid != there[0] for pid in self._pids(part)), BACK_S, self.log)

    def listens_at(self) -> set[IPAddress]:
        """Return the addresses at which its processes accept connections."""
        return {address for pid in self.processes() for address, _ in _listens_at(pid)}

    def ports(self) -> set[int]:
        """Return the ports at which its processes accept connections."""
        return {port for pid in self.processes() for _, port in _listens_at(pid)}

    def unix_sockets(self) -> set[str]:
        """Return the names of its processes' Unix sockets; that of an abstract socket begins with @."""
        rows = [row.split(maxsplit=7) for row in Path("/proc/net/unix").read_text().splitlines()]
        named = {f"socket:[{row[6]}]": row[7] for row in rows[1:] if len(row) == 8}
        return {named[file] for pid in self.processes() for file in _opened(pid) & named.keys()}

    def cpu_s(self) -> float:
        """Return the processor time of all threads of its living processes, in seconds since each began."""
        threads = [stat for pid in self.processes() for stat in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(stat.read_text().split()[0]) for stat in threads) / 1e9

    def share_of_a_core(self, during_s: float) -> float:
        """Return the share of a core that all its processes together used during this time."""
        before = self.cpu_s()
        time.sleep(during_s)
        return (self.cpu_s() - before) / during_s

    def ask(self, path: str, key: str = "") -> httpx.Response:
        return _HTTP.get(f"{self.url}{path}", headers={"Authorization": f"Bearer {key}"} if key else {})

    @property
    def is_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return self.ask("/ready").status_code == 200
        return False

    def metric(self, name: str, key: str = "") -> float:
        """Return the sum of a metric over its labels."""
        exposed = self.ask("/metrics", key).text
        assert f"# HELP alignedserve:{name} " in exposed, f"there is no metric {name}"
        return sum(map(float, re.findall(rf"^alignedserve:{name}(?:{{[^}}]*}})? (\S+)$", exposed, re.MULTILINE)))

    def send(self, number: int) -> None:
        """Send the signal as a user would: Ctrl-C goes to every process in the foreground of the terminal."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def stop(self, number: int = signal.SIGINT, within_s: float = STOP_S) -> int:
        self.send(number)
        return self.ended(within_s)

    def ended(self, within_s: float = STOP_S) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            left = self.processes()
            self._show_where_it_is()
            self.kill()
            raise AssertionError(f"it does not stop within {within_s} s, {left} are left:\n{self.log()}") from None

    def _show_where_it_is(self) -> None:
        """Have the launcher log the stacks of its threads; it ends with that."""
        self.process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STACKS_S)

    def kill(self) -> None:
        """Kill all processes at once, for tests that have failed."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def check_nothing_is_left(self, files: bool = True, processes_but: frozenset[str] = frozenset()) -> None:
        def left() -> set[str]:
            return set(self.processes().values()) - processes_but

        wait_until(lambda: not left(), GONE_S, lambda: f"{left()} are left:\n{self.log()}")
        # A process that is ending loses its environment, our mark, a moment before its sockets.
        wait_until(self._port_is_free, GONE_S, lambda: f"port {self.port} is in use:\n{self.log()}")
        in_memory = sorted(path.name for path in self.memory.iterdir())
        assert not files or not in_memory, f"{in_memory} are left in shared memory:\n{self.log()}"

    def _port_is_free(self) -> bool:
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections may linger
            probe.bind(("127.0.0.1", self.port))
            return True
        return False

    def forget(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


def launch(
    *arguments: str | Path,
    mark: str,
    stderr: IO[bytes],
    environment: Mapping[str, str] = MappingProxyType({}),
    typed_in: Path | None = None,
    plant: str = "",
) -> subprocess.Popen[bytes] | PreloadedLauncher:
    """Start `alignedserve serve`, with everything loaded already unless the environment changes what is loaded."""
    if is_loaded(environment):
        given = [*_SERVE, *map(str, arguments)]
        return PreloadedLauncher(given, environment_of(mark, environment), mark, stderr.fileno(), typed_in, plant)
    assert not plant, "faults are planted into what is loaded"
    return spawn(*arguments, mark=mark, stderr=stderr, environment=environment, typed_in=typed_in)


def spawn(
    *arguments: str | Path,
    mark: str = "",
    stderr: IO[bytes] | int = subprocess.PIPE,
    environment: Mapping[str, str] = MappingProxyType({}),
    typed_in: Path | None = None,
    program: Sequence[str] = (sys.executable, "-m", "alignedserve"),
) -> subprocess.Popen[bytes]:
    """Start `python -m alignedserve serve`, or another program that does so, with these arguments in a folder, or in
    this process's."""
    command = [*program, *_SERVE, *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment_of(mark, environment),
        start_new_session=True,
        cwd=typed_in,
    )


def environment_of(mark: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a deployment; other settings in the tests' environment do not reach it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ALIGNEDSERVE_", "RAY_"))}
    env |= {MARK: mark, "RAY_TMPDIR": _RAY_FILES.name, **RAY_FOR_TESTS}
    env |= {"PYTHONFAULTHANDLER": "1"}
    env |= {"SPT_NOENV": "1"}  # Ray's processes rename themselves, and would write the name over their environment
    env |= {"ALIGNEDSERVE_ENGINE_DEVICE": "cpu"}  # memory, timing and topologies are chosen for CPUs, also beside a GPU
    env |= {"ALIGNEDSERVE_CACHE_DIRECTORY": _PROFILES.name, "ALIGNEDSERVE_ENGINE_PROFILE_S": "1"}
    # Two threads of so small a model mostly wait for each other, beside other tests on the same cores.
    env |= {} if SOAK else {"ALIGNEDSERVE_ENGINE_THREADS": "1"}
    return env | {"ALIGNEDSERVE_JOBS_DIRECTORY": str(Path(_JOBS.name, mark)), **environment}


def marked(mark: str) -> dict[int, str]:
    """Return the living processes with this mark: pid -> command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # the process has ended meanwhile, or belongs to another user
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
    return {pid: command for pid, command in found.items() if command}


def part_of(command: str) -> str | None:
    """Return the name of the part whose process has this command line, or None.
    Each way to start a part puts the name in the title: `alignedserve: router`, of a part that was forked,
    `alignedserve.launch.start router`, or `ray::router.run()`."""
    found = re.search(r"(?:^alignedserve: |alignedserve\.launch\.start |^ray::)([a-z][\w-]*)(?:\.|$)", command)
    return found[1] if found else None


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Stop the process during the block, so that its unfinished work stays unfinished."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _listens_at(pid: int) -> set[tuple[IPAddress, int]]:
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    listening = {f"socket:[{row[9]}]": row[1].rpartition(":") for row in rows if row[3] == _LISTENS}
    heard = [listening[file] for file in _opened(pid) & listening.keys()]
    return {(_address(address), int(port, 16)) for address, _, port in heard}


def _opened(pid: int) -> set[str]:
    """Return the names of the process's open files."""
    opened = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed meanwhile
            opened.add(os.readlink(file))
    return opened


def _address(written: str) -> IPAddress:
    """Parse an address as the kernel writes it: words in the machine's byte order."""
    words = [int(written[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(written), 8)]
    address = ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


def wait_until(
    holds: Callable[[], bool], within_s: float, or_say: Callable[[], str] = lambda: "", look_s: float = LOOK_S
) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s} s: {or_say()}"
        time.sleep(look_s)


def replace_weights(model: Path) -> Path:
    """Put other weights of the same sizes into a model's folder, and return the file of those that were there."""
    weights = model / "model.safetensors"
    ours = weights.rename(model / "ours")
    content = bytearray(ours.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin + 1 :: 2] = bytes(byte ^ 0x80 for byte in content[begin + 1 :: 2])  # all signs, of BF16
    weights.write_bytes(content)
    return ours


def free_port() -> int:
    """Return a port that is free now: at port 0 no launcher could follow another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def shared_memory() -> Iterator[Path]:
    """Yield a folder in shared memory for one deployment, so that other deployments leave nothing in it."""
    folder = Path(tempfile.mkdtemp(prefix="e2e-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def deployed(*flags: str, memory: Path | None = None, **options: Any) -> Iterator[Deployment]:
    """Yield a Deployment with these options. If the test has not ended it, end it in good order, and check that it
    leaves nothing."""
    with shared_memory() if memory is None else nullcontext(memory) as folder:
        deployment = Deployment(*flags, memory=folder, **options)
        try:
            yield deployment
            if deployment.process.poll() is None:
                assert deployment.stop() == 0, deployment.log()
            deployment.check_nothing_is_left()
        except BaseException:
            print(deployment.log())
            raise
        finally:
            deployment.kill()
            deployment.forget()
