"""Clusters for tests, and deployments on them."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tests.cluster.growing import CONFIG
from tests.end_to_end.deployment import MARK, RAY_FOR_TESTS, STOP_S, Deployment, deployed, marked, part_of

Resources = Mapping[str, float]
STARTS = 4  # of a cluster, where a start fails


class Nodes:
    """Ray nodes on this machine, started by a process of their own; Ray nodes that a user has started are not
    touched."""

    def __init__(self, *command: str, environment: Mapping[str, str] = {}) -> None:
        """Start the cluster; `command` is a module of this folder, and its arguments. The nodes, and deployments on
        them, have `environment` too."""
        self._files = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": self._files.name,
            **RAY_FOR_TESTS,
            **environment,
        }
        self._mark = secrets.token_hex(8)
        set_for_all = {MARK: self._mark, "SPT_NOENV": "1"}  # the same as in tests/end_to_end/deployment.py
        given = [word.replace("FOLDER", self._files.name) for word in command]
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("ALIGNEDSERVE_", "RAY_"))
        }
        self.config = Path(self._files.name, CONFIG)
        start = partial(
            subprocess.Popen,
            [sys.executable, "-m", *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=inherited | self.environment | set_for_all,
        )
        self._process: subprocess.Popen[str] = start()
        for _ in range(STARTS - 1):
            try:
                self.address = self._answer()
                return
            except AssertionError:  # Ray gives a node 30 s to start, however slow the machine is at the time
                self._process.communicate(timeout=STOP_S)
                self._process = start()
        self.address = self._answer()

    def add(self, node: Resources) -> None:
        self._order(f"add {json.dumps(node)}")

    def kill(self, number: int) -> None:
        self._order(f"kill {number}")

    def delete(self, number: int) -> None:
        """End a node as Kubernetes ends a pod."""
        self._order(f"delete {number}")

    def gcs_server(self) -> int:
        """Return the process of Ray's server on the head."""
        (pid,) = (pid for pid, command in self.processes().items() if "/gcs_server " in command)
        return pid

    def restart_gcs_server(self) -> None:
        self._order("restart gcs_server")

    def count(self) -> int:
        """Return the number of nodes, the head among them."""
        return sum(bool(re.search(r"/raylet/raylet ", command)) for command in self.processes().values())

    def processes(self) -> dict[int, str]:
        """Return all living processes of the nodes: pid -> command line."""
        return marked(self._mark)

    def pid(self, part: str) -> int | None:
        """Return the pid of the actor with this name, or None if it does not run."""
        return next((pid for pid, command in self.processes().items() if part_of(command) == part), None)

    def home(self, part: str) -> int | None:
        """Return the node's own process under which the part runs."""
        pid = self.pid(part)
        if pid is None:
            return None
        return int(re.findall(r"^PPid:\t(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])

    def kill_home(self, home: int) -> None:
        """Kill a node, while every node that was made is still there."""
        raylets = [pid for pid, command in self.processes().items() if command.split()[0].endswith("/raylet")]
        self.kill(sorted(raylets, key=_began_at).index(home))

    def _order(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        assert self._answer() == order

    def _answer(self) -> str:
        """Return the next answer, and skip what Ray itself prints on standard output."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("add ", "kill ", "delete ", "restart ")) or line[:1].isdigit():
                return line.strip()
        raise AssertionError("the cluster has ended")

    def end(self) -> None:
        self._process.communicate(timeout=STOP_S)
        # Idle workers of a lost node have stayed for an hour where the clock had stepped back (Ray 2.60).
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._files.cleanup()


def _began_at(pid: int) -> int:
    """Return when the process began, in ticks since the machine started: process numbers are reused, so they give no
    order."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@contextmanager
def clustered(*nodes: Resources, environment: Mapping[str, str] = {}) -> Iterator[Nodes]:
    """Yield a cluster of these nodes, numbered in this order; the first is the head."""
    yield from _until_done(Nodes("tests.cluster.nodes", *map(json.dumps, nodes), environment=environment))


@contextmanager
def growing(node: Resources, most: int) -> Iterator[Nodes]:
    """Yield a cluster that adds nodes like this one to its head, as many as are needed."""
    yield from _until_done(Nodes("tests.cluster.growing", "FOLDER", json.dumps(node), str(most)))


def _until_done(nodes: Nodes) -> Iterator[Nodes]:
    try:
        yield nodes
    finally:
        nodes.end()


@contextmanager
def deployed_on(nodes: Nodes, topology: str, *flags: str, memory: Path | None = None) -> Iterator[Deployment]:
    where, on = ("--ray-address", nodes.address, *flags), nodes.environment
    with deployed(*where, memory=memory, topology=topology, launcher="ray", environment=on) as deployment:
        yield deployment
