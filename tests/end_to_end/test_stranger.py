"""Tests that another user of this machine cannot speak as a part of a deployment, and that junk stops no worker."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from alignedserve.core import Role
from alignedserve.protocol.messages import LAUNCHER, Died, Heartbeat, Member
from alignedserve.protocol.wire import Envelope, encode
from tests.end_to_end.client import all_tokens, check_greedy, mixed
from tests.end_to_end.deployment import ANSWER_S, BACK_S, Deployment, deployed, wait_until
from tests.rare import rarely

_NOBODY = 65534
_FAR = 2**62
_RANKS = "decode-0", "decode-0-rank-1"
# Two connections to each port, without keys and with keys of its own, and one to each socket file. What it says is the
# ports and files that let it in, after all its frames have left for them.
_STRANGER = """
import json, os, socket, sys
import zmq

given = json.load(sys.stdin)
os.setgroups([])
os.setgid(given["user"])
os.setuid(given["user"])
context, poller, asked = zmq.Context(), zmq.Poller(), {}
for port in given["ports"]:
    for has_keys in (False, True):
        link = context.socket(zmq.PUSH)
        link.setsockopt(zmq.HANDSHAKE_IVL, 1000)
        link.setsockopt(zmq.LINGER, 10_000)
        if has_keys:
            public, secret = zmq.curve_keypair()
            link.curve_publickey, link.curve_secretkey, link.curve_serverkey = public, secret, public
        monitor = link.get_monitor_socket()
        poller.register(monitor, zmq.POLLIN)
        asked[monitor] = link, port
        link.connect(f"tcp://127.0.0.1:{port}")
ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
ends |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
entered = []
while asked:
    heard = poller.poll(60_000)
    assert heard, f"neither let in nor refused by {[port for _, port in asked.values()]}"
    for monitor, _ in heard:
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        if monitor not in asked or not event & ends:
            continue
        link, port = asked.pop(monitor)
        poller.unregister(monitor)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            entered.append(port)
            for frame in given["frames"]:
                link.send(bytes.fromhex(frame))
            link.close()
        else:
            link.close(linger=0)
for name in given["files"]:
    try:
        socket.socket(socket.AF_UNIX).connect(name.replace("@", chr(0), 1))
        entered.append(name)
    except OSError:
        pass
context.destroy()  # it waits until the frames have left: the end of the process does not
print(json.dumps(entered))
"""


@dataclass(frozen=True)
class Open:
    """An inbox without keys, as links had none once."""

    socket: zmq.Socket[bytes]
    port: int


@pytest.fixture
def unguarded() -> Any:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        yield Open(socket, socket.bind_to_random_port("tcp://127.0.0.1"))


def forged() -> list[bytes]:
    """Return frames that were believed once: of a worker that nobody started, and of deaths far ahead."""
    worker = Member("prefill-9", Role.PREFILL, "here", _FAR, "tcp://127.0.0.1:9")
    return [
        encode(Envelope("prefill-9", _FAR, 1, Heartbeat(worker))),
        *(encode(Envelope(LAUNCHER, 0, 2, Died(part, _FAR))) for part in ("prefill-0", "decode-0", "pool-0")),
    ]


def let_in(ports: Sequence[int], files: Sequence[str]) -> list[int | str]:
    """Return which of these let a process of another user in."""
    frames = [frame.hex() for frame in forged()]
    given = json.dumps({"user": _NOBODY, "ports": ports, "files": files, "frames": frames})
    done = subprocess.run(
        [sys.executable, "-c", _STRANGER], input=given, capture_output=True, text=True, timeout=ANSWER_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_is_heard_by_no_part(unguarded: Open, deployment: Deployment) -> None:
    chats = mixed(4, seed=6, outputs=(1, 40))
    check_greedy(chats, asyncio.run(all_tokens(deployment.url, chats)))
    before = set(deployment.processes())
    ports, files = sorted(deployment.ports()), sorted(deployment.unix_sockets())
    assert ports == [deployment.port]  # parts have sockets that only this user may open
    assert len(files) > 4
    assert let_in([*ports, unguarded.port], files) == [unguarded.port]
    check_greedy(chats, asyncio.run(all_tokens(deployment.url, chats)))
    assert set(deployment.processes()) == before, deployment.log()
    assert "prefill-9" not in deployment.whole_log()
    assert readable(deployment) == []
    assert [unguarded.socket.recv() for _ in forged()] == forged()


def test_ranks_have_no_port_and_are_stopped_by_no_junk_while_they_meet() -> None:
    """Other users reach nothing of them; junk comes from a process of this user while a killed rank comes back."""
    with deployed("--tensor-parallel-size", "2", topology="1+1") as deployment:
        wanted = mixed(4, seed=6, outputs=(20, 40))
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert deployment.ports() == {deployment.port}
        files = sorted(deployment.unix_sockets())
        of_rank_0 = next(name for name in files if name.endswith("-decode-0.1-ranks.sock"))  # connections keep the name

        def doors() -> set[str | int]:
            ours = Path(of_rank_0.replace("-decode-0.1-", "-decode-0*-"))
            return {str(path) for path in ours.parent.glob(ours.name)}

        def restarted(before: set[int]) -> set[int]:
            deployment.wound("decode-0-rank-1")
            wait_until(lambda: not before & deployment.processes().keys(), BACK_S, deployment.log)
            wait_until(lambda: all(map(deployment.runs, _RANKS)), BACK_S, deployment.log)
            return {deployment.pid(name) for name in _RANKS}

        if os.geteuid() == 0:
            assert let_in([deployment.port], files) == []
        pids = {deployment.pid(name) for name in _RANKS}
        with besieged(doors) as reached:
            while not reached:  # they meet within milliseconds
                pids = restarted(pids)
                wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
            check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert {deployment.pid(name) for name in _RANKS} == pids, deployment.log()
        assert not doors(), "they listen only while they meet"
        assert deployment.ports() == {deployment.port}


def readable(deployment: Deployment) -> list[Path]:
    """Return the files of its memory that other users may open."""
    found = [path for path in deployment.memory.rglob("*") if path.is_file()]
    assert found
    return [path for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077]


@contextmanager
def besieged(places: Callable[[], set[str | int]]) -> Iterator[set[str | int]]:
    """Say junk, or nothing, at these ports and sockets, again and again; yield those that were reached."""
    said, reached, is_over = (
        [b"", os.urandom(64), os.urandom(4096), os.urandom(32)],
        set[str | int](),
        threading.Event(),
    )

    def come(place: str | int, data: bytes) -> socket.socket:
        link = socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET)
        with suppress(OSError):
            link.connect(place if isinstance(place, str) else ("127.0.0.1", place))
            reached.add(place)
            link.sendall(data)
        return link

    def besiege() -> None:
        held: list[socket.socket] = []
        while not is_over.is_set():
            held += [come(place, data) for place in places() for data in said]
            while len(held) > 200:
                held.pop(0).close()

    besieger = threading.Thread(target=besiege)
    besieger.start()
    try:
        yield reached
    finally:
        is_over.set()
        besieger.join()


@pytest.mark.parametrize("transport", ["ipc", rarely("collective")])
def test_junk_at_workers_that_send_kv_directly_stops_none_and_changes_no_token(transport: str) -> None:
    """It comes from a process that may open the workers' files; another user's may not."""
    flags = ("--transport", transport, "--set", "schedule.helps=false", "--pool-verify-pages", "--log-level", "debug")
    with deployed(*flags, topology="1+1") as deployment:
        before, wanted = set(deployment.processes()), mixed(6, seed=21, outputs=(60, 120))

        def mailboxes() -> set[str | int]:
            return {name for name in deployment.unix_sockets() if name.endswith("-mail.sock")}

        # So that the workers connect meanwhile.
        with besieged(lambda: mailboxes() | (deployment.ports() - {deployment.port})) as reached:
            for _ in range(2):
                check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert len(files := mailboxes()) == 2
        assert reached >= files
        assert "is pulled from" in deployment.whole_log(), "KV went from worker to worker"
        assert deployment.metric("kv_transfers_failed_total") == 0
        assert set(deployment.processes()) == before, deployment.log()
        assert deployment.ports() == {deployment.port}, "workers listen at a port only while they connect"
        assert readable(deployment) == []
        if os.geteuid() == 0:
            assert let_in([deployment.port], sorted(deployment.unix_sockets())) == []
