"""Links with keys: the links of a deployment connect, and a stranger's frame is never read."""

from __future__ import annotations

import pytest
import zmq

from alignedserve.protocol.events import Received
from alignedserve.protocol.membership import UNNUMBERED
from alignedserve.protocol.messages import ROUTER, AskPages, Died, Heartbeat
from alignedserve.protocol.wire import Envelope, encode
from alignedserve.shell.link_keys import LinkKeys
from alignedserve.shell.links import Links, Pulse, tell
from tests.shell.conftest import DEADLINE_S, Start, member, wait_for

OURS = LinkKeys.new()


def stranger(keys: LinkKeys | None, server: str | None) -> zmq.Socket[bytes]:
    """Return a socket with these keys, which takes `server` for the deployment's public key."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 1000)
    if keys is not None and server is not None:
        keys.show(socket)
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server)
    return socket


def refused(router: Links, socket: zmq.Socket[bytes]) -> bool:
    """Whether the socket's connection ends in the handshake."""
    failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    watch = socket.get_monitor_socket(failures | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(router.address)
    assert watch.poll(int(DEADLINE_S * 1000)), "neither refused nor let in"
    event = int.from_bytes(watch.recv_multipart()[0][:2], "little")
    socket.disable_monitor()
    watch.close()
    socket.close()
    return event != zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_those_with_the_keys_speak(start: Start) -> None:
    router, worker = start(ROUTER, keys=OURS), start("worker", 5, keys=OURS)
    for pages in range(50):
        worker.send(ROUTER, AskPages(pages))
    assert wait_for(router, 50) == [Received("worker", AskPages(pages), 5) for pages in range(50)]
    router.connect("worker", worker.address)
    router.send("worker", AskPages(7))
    assert wait_for(worker, 1) == [Received(ROUTER, AskPages(7), 1)]


def test_launchers_and_heartbeats_too(start: Start) -> None:
    router = start(ROUTER, keys=OURS)
    tell(router.address, Died("worker", 5), OURS)
    assert wait_for(router, 1) == [Received("launcher", Died("worker", 5), 0)]
    worker = start("worker", 5, keys=OURS)
    pulse = Pulse(member(worker), router.address, 0.01, OURS)
    assert wait_for(router, 1)[0] == Received("worker", Heartbeat(member(worker)), 5)
    pulse.stop()


@pytest.mark.parametrize(
    ("keys", "server"),
    [(None, None), (LinkKeys.new(), OURS.public), (LinkKeys.new(), LinkKeys.new().public)],
    ids=["none", "its own, though it knows our public one", "its own"],
)
def test_a_stranger_is_not_let_in(start: Start, keys: LinkKeys | None, server: str | None) -> None:
    router, worker = start(ROUTER, keys=OURS), start("worker", 5, keys=OURS)
    intruder = stranger(keys, server)
    assert refused(router, intruder)
    worker.send(ROUTER, AskPages(1))
    assert wait_for(router, 1) == [Received("worker", AskPages(1), 5)], "those who may still speak"


def test_a_frame_that_a_stranger_sends_is_never_read(start: Start) -> None:
    router, worker = start(ROUTER, keys=OURS), start("worker", 5, keys=OURS)
    intruder = stranger(LinkKeys.new(), OURS.public)
    intruder.connect(router.address)
    intruder.send(encode(Envelope("worker", 6, UNNUMBERED, AskPages(666))))
    assert refused(router, stranger(LinkKeys.new(), OURS.public))  # gives the first stranger as much time to be heard
    worker.send(ROUTER, AskPages(1))
    assert wait_for(router, 1) == [Received("worker", AskPages(1), 5)]
    intruder.close()


def test_without_keys_nobody_enters_a_guarded_inbox(start: Start) -> None:
    router = start(ROUTER, keys=OURS)
    tell(router.address, Died("worker", 5))
    tell(router.address, Died("other", 5), OURS)
    assert wait_for(router, 1) == [Received("launcher", Died("other", 5), 0)]


def test_the_secret_is_not_shown() -> None:
    assert OURS.secret not in repr(OURS)
