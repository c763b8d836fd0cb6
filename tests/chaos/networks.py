"""Machines of a cluster that can be cut off: network namespaces on one switch, each with a Ray node of its own.

They need root. Nothing of this machine is changed but the namespaces, which are removed again.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path

from tests.chaos.absent import Absent
from tests.cluster.conftest import Resources
from tests.cluster.nodes import STORE_BYTES
from tests.end_to_end.deployment import MARK, RAY_FOR_TESTS, START_S, STOP_S, marked

_NET = 0x40000000  # CLONE_NEWNET
_PORT = 6379
_NOBODY = "02:00:00:00:00:01"


@dataclass(frozen=True)
class Wire:
    """The wire between a machine and the switch. No machine sees that it is cut: frames just do not arrive."""

    switch: str
    port: str

    def cut(self) -> None:
        _ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def mend(self) -> None:
        _ip("-n", self.switch, "link", "set", self.port, "master", "bridge")


@dataclass(frozen=True)
class OneWayRoad:
    """What one machine sends to another. While it is cut, frames go to an address of hardware that nobody has."""

    network: str
    to: str

    def cut(self) -> None:
        _ip("-n", self.network, "neigh", "replace", self.to, "lladdr", _NOBODY, "dev", "wire", "nud", "permanent")

    def mend(self) -> None:
        _ip("-n", self.network, "neigh", "del", self.to, "dev", "wire")


@dataclass(frozen=True)
class Machines:
    address: str  # of the Ray cluster
    wires: Sequence[Wire]  # of all machines but the head
    roads: Sequence[OneWayRoad]  # between any two machines
    environment: Mapping[str, str]  # for a deployment on them
    mark: str

    def processes(self) -> dict[int, str]:
        return marked(self.mark)


@contextmanager
def machines(*nodes: Resources) -> Iterator[Machines]:
    """Yield a machine for each Ray node, the first with the head. This thread, and what it starts, is on the head."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise Absent("networks are not cut: it takes root and `ip` to make network namespaces")
    name, mark = f"as-{os.getpid()}", secrets.token_hex(8)
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as files:
        _make(stack, name)
        _ip("-n", name, "link", "add", "bridge", "type", "bridge")
        _ip("-n", name, "link", "set", "bridge", "up")
        networks = [f"{name}-{number}" for number in range(len(nodes))]
        wires = [_join(stack, name, network, number) for number, network in enumerate(networks)]
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment = {**token, "RAY_TMPDIR": files, **RAY_FOR_TESTS}
        stack.enter_context(_inside(networks[0]))
        for number, node in enumerate(nodes):
            stack.enter_context(_ray_node(networks[number], number, node, {**environment, MARK: mark}))
        pairs = permutations(range(len(networks)), 2)
        roads = [OneWayRoad(networks[sender], _address(to)) for sender, to in pairs]
        yield Machines(f"{_address(0)}:{_PORT}", wires[1:], roads, environment, mark)


def _address(number: int) -> str:
    return f"10.203.0.{number + 1}"


def _make(stack: ExitStack, network: str) -> None:
    _ip("netns", "add", network)
    stack.callback(_ip, "netns", "del", network)


def _join(stack: ExitStack, switch: str, network: str, number: int) -> Wire:
    _make(stack, network)
    port = f"port{number}"
    _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "wire", "netns", network)
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", network, "address", "add", f"{_address(number)}/24", "dev", "wire")
    for device in ("lo", "wire"):
        _ip("-n", network, "link", "set", device, "up")
    _ip("-n", network, "route", "add", "default", "dev", "wire")  # a machine learns its own address from this route
    return Wire(switch, port)


@contextmanager
def _inside(network: str) -> Iterator[None]:
    """Move this thread into the network, and back at the end."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{network}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.setns(there, _NET):
            raise Absent(f"networks are not cut: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        libc.setns(home, _NET)
        os.close(home)
        os.close(there)


@contextmanager
def _ray_node(network: str, number: int, node: Resources, environment: Mapping[str, str]) -> Iterator[None]:
    resources = {name: count for name, count in node.items() if name != "CPU"}
    role = (
        ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        if not number
        else [f"--address={_address(0)}:{_PORT}"]
    )
    command = [
        *("ip", "netns", "exec", network, str(Path(sys.executable).with_name("ray")), "start", "--block", *role),
        *(f"--node-ip-address={_address(number)}", f"--num-cpus={node['CPU']}", f"--resources={json.dumps(resources)}"),
        *(f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"),
    ]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ALIGNEDSERVE_", "RAY_"))}
    set_for_all = {**inherited, **environment, "SPT_NOENV": "1"}
    start = partial(subprocess.Popen, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = start(env=set_for_all)
    try:
        try:
            _wait_until_it_runs(process)
        except AssertionError:  # Ray gives a node 30 s to start, however slow the machine is at the time
            process.communicate(timeout=STOP_S)
            process = start(env=set_for_all)
            _wait_until_it_runs(process)
        yield
    finally:
        process.terminate()
        process.communicate(timeout=STOP_S)


def _wait_until_it_runs(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    said, deadline = "", time.monotonic() + START_S
    for line in process.stdout:
        said += line
        if "Ray runtime started" in line or time.monotonic() > deadline:
            return
    raise AssertionError(f"a Ray node does not start:\n{said}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
