"""Links with keys: the links of a deployment connect, and a stranger's frame is never read."""

from __future__ import annotations

import pytest
import zmq

from alignedserve.protocol.events import Received
from alignedserve.protocol.membership import UNNUMBERED
from alignedserve.protocol.messages import LAUNCHER, ROUTER, AskPages, Died, Heartbeat
from alignedserve.protocol.wire import Envelope, encode
from alignedserve.shell.link_keys import DeploymentKeys, LinkKeys
from alignedserve.shell.links import Links, Pulse
from tests.shell.conftest import DEADLINE_S, OURS, Start, beat_of, member, wait_for

PARTS = OURS.parts


def stranger(keys: LinkKeys | None, server: str | None) -> zmq.Socket[bytes]:
    """Return a socket with these keys, which takes `server` for the public key of the parts."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 1000)
    if keys is not None:
        keys.show(socket)
    if server is not None:
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


def test_members_with_the_keys_speak(start: Start) -> None:
    router, worker = start(ROUTER), start("worker", 5)
    for pages in range(50):
        worker.send(ROUTER, AskPages(pages))
    assert wait_for(router, 50) == [Received("worker", AskPages(pages), 5) for pages in range(50)]
    router.connect("worker", worker.address)
    router.send("worker", AskPages(7))
    assert wait_for(worker, 1) == [Received(ROUTER, AskPages(7), 1)]


def test_launchers_and_heartbeats_too(start: Start) -> None:
    router = start(ROUTER)
    launcher = Pulse(LAUNCHER, 0, Died("worker", 5), router.address, 3600.0, OURS.launcher)
    assert wait_for(router, 1) == [Received(LAUNCHER, Died("worker", 5), 0)]
    launcher.stop()
    worker = start("worker", 5)
    pulse = beat_of(member(worker), router.address)
    assert wait_for(router, 1)[0] == Received("worker", Heartbeat(member(worker)), 5)
    pulse.stop()


def test_the_launcher_is_known_by_its_keys(start: Start) -> None:
    """A part that calls itself the launcher is not heard, and the launcher speaks to the router alone."""
    router, worker = start(ROUTER), start("worker", 5)
    impostor = Pulse(LAUNCHER, 0, Died("worker", 5), router.address, 3600.0, PARTS)
    impostor.say(Died("worker", 6))
    launcher = stranger(OURS.launcher, None)
    assert refused(worker, launcher)
    worker.send(ROUTER, AskPages(1))
    honest = Pulse(LAUNCHER, 0, Died("other", 5), router.address, 3600.0, OURS.launcher)
    heard = wait_for(router, 2)
    impostor.stop()
    honest.stop()
    heard += router.receive(0.0)
    assert sorted(heard, key=str) == [Received(LAUNCHER, Died("other", 5), 0), Received("worker", AskPages(1), 5)]


@pytest.mark.parametrize(
    ("keys", "server"),
    [
        (None, None),
        (DeploymentKeys.new().parts, PARTS.public),
        (DeploymentKeys.new().parts, DeploymentKeys.new().parts.public),
    ],
    ids=["none", "its own, though it knows our public one", "its own"],
)
def test_a_stranger_is_not_let_in(start: Start, keys: LinkKeys | None, server: str | None) -> None:
    router, worker = start(ROUTER), start("worker", 5)
    intruder = stranger(keys, server)
    assert refused(router, intruder)
    worker.send(ROUTER, AskPages(1))
    assert wait_for(router, 1) == [Received("worker", AskPages(1), 5)], "those who may still speak"


def test_a_frame_that_a_stranger_sends_is_never_read(start: Start) -> None:
    router, worker = start(ROUTER), start("worker", 5)
    intruder = stranger(DeploymentKeys.new().parts, PARTS.public)
    intruder.connect(router.address)
    intruder.send(encode(Envelope("worker", 6, UNNUMBERED, AskPages(666))))
    assert refused(
        router, stranger(DeploymentKeys.new().parts, PARTS.public)
    )  # gives the first stranger as much time to be heard
    worker.send(ROUTER, AskPages(1))
    assert wait_for(router, 1) == [Received("worker", AskPages(1), 5)]
    intruder.close()


def test_the_secret_is_not_shown() -> None:
    assert OURS.parts.secret not in repr(OURS)
