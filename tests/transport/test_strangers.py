"""Tests that who has no keys of the deployment neither hears nor stops two workers, whatever it says and however often.

A stranger comes to both places where a worker listens: its mailbox all the time, and the door of a group before the
source does.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import zmq

from alignedserve.engine.device.groups import BrokenGroup
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.shell.link_keys import DeploymentKeys, LinkKeys
from alignedserve.transport.joining import SECRET_BYTES, entered, listening
from alignedserve.transport.mailbox import Mailbox
from alignedserve.transport.meeting import Direction, Meeting
from tests.transport.nodes import DEADLINE_S, HOST, KEYS, SOON_S, Node, meet
from tests.transport.test_transfers import arrives, order

FOREIGN = DeploymentKeys.new().parts
HALF_KNOWN = replace(FOREIGN, parts=KEYS.parts)  # it knows the public key of the deployment
AT_ONCE_S = 20.0  # far below the limit of a transfer, on any machine
MOST_GROWN_MB = 64
SAID = {
    "nothing": [b""],
    "junk": [b"x", os.urandom(64), os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 9 + b"\x7f" + bytes(54)],
    "half": [os.urandom(32), b"\xff" + bytes(8) + b"\x7f\x03"],  # of a proof, and of ZeroMQ's greeting
    "many": [os.urandom(64), b""] * 100,
}
Address = tuple[str, int]


def come(address: Address, said: list[bytes]) -> list[socket.socket]:
    """Connect once for each of these, say it, and stay."""
    came = []
    for data in said:
        with suppress(OSError):
            came.append(socket.create_connection(address, DEADLINE_S))
            came[-1].sendall(data)
    return came


def port_of(mailbox: Mailbox) -> int:
    return int(mailbox.address.rpartition(":")[2])


class Besieged(Mailbox):
    """A mailbox whose owner's doors are found by strangers before the source learns of them."""

    def __init__(self, said: list[bytes], keys: LinkKeys, host: str) -> None:
        super().__init__(keys, host)
        self.strangers, self._said = list[socket.socket](), said

    def post(self, address: str, box: str, note: bytes, deadline: float) -> None:
        if "/group/" in box:
            _, host, port = note.decode().split()
            self.strangers += come((host, int(port)), self._said)
        super().post(address, box, note, deadline)


@pytest.mark.parametrize("said", SAID)
def test_strangers_at_every_port_neither_hear_nor_stop_a_pair(said: str) -> None:
    before_mb = memory_mb()
    source, to = (Node(name, mailbox_of=partial(Besieged, SAID[said])) for name in ("prefill-0", "decode-0"))
    with closing(source.transport), closing(to.transport):
        meet(source, to)
        boxes = [node.transport._mailbox for node in (source, to)]
        at_boxes = [link for box in boxes for link in come((HOST, port_of(box)), SAID[said])]
        began = time.monotonic()
        for number in (1, 3):
            assert arrives(source, to, number)
            assert arrives(to, source, number)
            for node in (source, to):  # the next transfers need new groups
                for channel in node.transport._channels.values():
                    channel._drop_group()
        assert time.monotonic() - began < AT_ONCE_S
        assert source.transport.num_failed == to.transport.num_failed == 0
        at_doors = [link for box in boxes if isinstance(box, Besieged) for link in box.strangers]
        assert len(at_doors) >= 4 * len(SAID[said])
        for stranger in at_doors:
            assert len(all_heard(stranger)) <= SECRET_BYTES, "it hears a nonce at most, and its connection ends"
        for stranger in at_boxes:
            stranger.close()
    assert memory_mb() - before_mb < MOST_GROWN_MB


def all_heard(link: socket.socket) -> bytes:
    heard = b""
    with closing(link), suppress(ConnectionResetError):
        link.settimeout(DEADLINE_S)
        while more := link.recv(4096):
            heard += more
    return heard


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_strangers_that_come_again_and_again_while_transfers_run() -> None:
    source, to = Node("prefill-0"), Node("decode-0")
    with closing(source.transport), closing(to.transport):
        meet(source, to)
        is_over = threading.Event()

        def besiege() -> None:
            while not is_over.is_set():
                for node in (source, to):
                    for stranger in come((HOST, port_of(node.transport._mailbox)), SAID["junk"] + SAID["half"]):
                        stranger.close()

        besieger = threading.Thread(target=besiege)
        besieger.start()
        for number in range(1, 40):
            assert arrives(source, to, number)
            source.transport._channels[Direction(source.holder, to.holder)]._drop_group()
        is_over.set()
        besieger.join()
        assert source.transport.num_failed == to.transport.num_failed == 0


def test_workers_of_two_deployments_do_not_connect() -> None:
    source, to = Node("prefill-0"), Node("decode-0", keys=HALF_KNOWN)
    with closing(source.transport), closing(to.transport):
        meet(source, to)
        with to.hurried():
            for node, what in zip((source, to), order(source, to, 1), strict=True):
                node.start(what)
            assert source.outcome() == KvSent(1, to.holder, ok=False)
            assert to.outcome() == KvReceived(1, source.holder, intact=False)


def test_what_listens_in_the_place_of_a_receiver_is_sent_nothing_but_a_proof() -> None:
    with listening((HOST, 0)) as door:
        heard = []

        def answer() -> None:
            link, _ = door.accept()
            with link:
                link.sendall(os.urandom(32))
                heard.append(link.recv(4096))
                link.sendall(os.urandom(32))
                heard.append(link.recv(4096))

        stranger = threading.Thread(target=answer)
        stranger.start()
        with pytest.raises(BrokenGroup, match="has not proved"):
            entered(door.getsockname(), os.urandom(SECRET_BYTES), DEADLINE_S)
        stranger.join()
        assert [len(one) for one in heard] == [64, 0]


# --- The mailbox


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with closing(Mailbox(KEYS, HOST)) as mailbox:
        yield mailbox


def soon(wait_s: float = DEADLINE_S) -> float:
    return time.monotonic() + wait_s


def test_notes_are_taken_in_the_order_in_which_they_came(mailbox: Mailbox) -> None:
    with closing(Mailbox(KEYS, HOST)) as other:
        for note in (b"first", b"second"):
            other.post(mailbox.address, "a", note, soon())
        other.post(mailbox.address, "b", b"\0\xff", soon())
    assert [mailbox.take(box, soon()) for box in "aba"] == [b"first", b"\0\xff", b"second"]
    with pytest.raises(BrokenGroup, match="no answer in time"):
        mailbox.take("a", soon(0.0))


@pytest.mark.parametrize("keys", [FOREIGN, HALF_KNOWN])
def test_other_keys_leave_no_note(mailbox: Mailbox, keys: LinkKeys) -> None:
    began = time.monotonic()
    with closing(Mailbox(keys, HOST)) as stranger, pytest.raises(BrokenGroup, match="cannot be reached"):
        stranger.post(mailbox.address, "a", b"theirs", soon())
    assert time.monotonic() - began < AT_ONCE_S
    mailbox.leave("a", b"ours")
    assert mailbox.take("a", soon()) == b"ours"


def test_without_keys_nothing_is_heard(mailbox: Mailbox) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.REQ) as bare:
        bare.setsockopt(zmq.LINGER, 0)
        bare.connect(mailbox.address)
        bare.send_multipart([b"a", b"theirs"])
        assert not bare.poll(500)
    with pytest.raises(BrokenGroup):
        mailbox.take("a", soon(0.0))


def test_a_part_of_another_version_stops_nobody(mailbox: Mailbox) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    for said in ([b"one"], [b"a", b"b", b"c"], [b"\xff", b"no text"]):
        with context.socket(zmq.REQ) as odd:
            KEYS.show(odd)
            odd.connect(mailbox.address)
            odd.send_multipart(said)
            assert odd.recv() == b""
    mailbox.post(mailbox.address, "a", b"ours", soon())
    assert mailbox.take("a", soon()) == b"ours"


def gone(_: Path) -> str:
    with closing(Mailbox(KEYS, HOST)) as mailbox:
        return mailbox.address


@pytest.mark.parametrize(
    "at", [gone, lambda folder: f"ipc://{folder}/nothing.sock", lambda _: "127.0.0.1:4000"], ids=["gone", "file", "old"]
)
def test_where_no_mailbox_is_is_found_out_at_once(mailbox: Mailbox, at: Callable[[Path], str], tmp_path: Path) -> None:
    """The third is an address as other versions have it."""
    began = time.monotonic()
    with pytest.raises(BrokenGroup):
        mailbox.post(at(tmp_path), "a", b"", soon())
    assert time.monotonic() - began < AT_ONCE_S


def test_a_silent_mailbox_is_waited_for_until_the_deadline(mailbox: Mailbox) -> None:
    with listening((HOST, 0)) as silent, pytest.raises(BrokenGroup, match="does not answer in time"):
        mailbox.post(f"tcp://{HOST}:{silent.getsockname()[1]}", "a", b"", soon(SOON_S))


def test_a_path_with_spaces_is_an_address_without_any(mailbox: Mailbox, tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    with closing(Mailbox(KEYS, HOST, f"ipc://{folder}/mail.sock")) as there:
        mailbox.post(there.address, "a", b"ours", soon())
        assert there.take("a", soon()) == b"ours"
        assert len(there.address.split()) == 1


def test_a_closed_mailbox_leaves_no_thread_and_wakes_its_posts() -> None:
    before, mailbox = threading.active_count(), Mailbox(KEYS, HOST)
    with listening((HOST, 0)) as silent:
        at, ended = f"tcp://{HOST}:{silent.getsockname()[1]}", list[BrokenGroup]()

        def post() -> None:
            with pytest.raises(BrokenGroup) as raised:
                mailbox.post(at, "a", b"", soon())
            ended.append(raised.value)

        posting = threading.Thread(target=post)
        posting.start()
        silent.accept()
        mailbox.close()
        posting.join(AT_ONCE_S)
    assert len(ended) == 1
    assert threading.active_count() == before


def test_posts_that_time_out_as_their_mailbox_closes_hold_it_up_no_longer() -> None:
    with listening((HOST, 0)) as silent:
        at, mailbox = f"tcp://{HOST}:{silent.getsockname()[1]}", Mailbox(KEYS, HOST)
        first_at = time.monotonic() + SOON_S

        def post(number: int) -> None:
            with suppress(BrokenGroup):
                mailbox.post(at, "a", b"", first_at + number / 1000)

        posting = [threading.Thread(target=post, args=(number,)) for number in range(10)]
        for thread in posting:
            thread.start()
        time.sleep(max(0.0, first_at - time.monotonic()))
        closing_it = threading.Thread(target=mailbox.close, daemon=True)
        closing_it.start()
        closing_it.join(AT_ONCE_S)
        assert not closing_it.is_alive()
        for thread in posting:
            thread.join(AT_ONCE_S)


def test_who_waits_for_a_note_is_woken_as_the_mailbox_closes() -> None:
    mailbox, began = Mailbox(KEYS, HOST), time.monotonic()
    threading.Timer(0.1, mailbox.close).start()
    with pytest.raises(BrokenGroup):
        mailbox.take("a", soon(2 * AT_ONCE_S))
    assert time.monotonic() - began < AT_ONCE_S


def test_an_offer_that_comes_after_a_newer_one_is_not_accepted() -> None:
    """A post that was not answered in time may still arrive."""
    direction = Direction("prefill-0.1", "decode-0.1")
    with closing(Mailbox(KEYS, HOST)) as source, closing(Mailbox(KEYS, HOST)) as to:
        receiver = Meeting(to, source.address, direction, is_source=False, timeout_s=DEADLINE_S)
        for said in ("offer 4", "offer 3", "go 4"):
            to.leave(f"{direction}/to", said.encode())
        accepting = threading.Thread(target=partial(receiver.accept, 1, soon()))
        accepting.start()
        assert source.take(f"{direction}/source", soon()) == b"accept 4"
        secret, host, port = source.take(f"{direction}/group/4", soon()).decode().split()
        entered((host, int(port)), bytes.fromhex(secret), DEADLINE_S).close()
        accepting.join(AT_ONCE_S)
        assert not accepting.is_alive()
        with pytest.raises(BrokenGroup):
            source.take(f"{direction}/source", soon(0.0))


def test_secrets_of_groups_that_were_given_up_do_not_stay() -> None:
    direction = Direction("prefill-0.1", "decode-0.1")
    with closing(Mailbox(KEYS, HOST)) as source, closing(Mailbox(KEYS, HOST)) as to:
        source.leave(f"{direction}/group/7", b"a secret")
        offering = Meeting(source, to.address, direction, is_source=True, timeout_s=SOON_S)
        with pytest.raises(BrokenGroup):
            offering.offer(1, soon(SOON_S))
        with pytest.raises(BrokenGroup):
            source.take(f"{direction}/group/7", soon(0.0))
