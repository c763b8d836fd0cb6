"""Links between real sockets on this machine: in order, once, and with reports of missing frames."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from alignedserve.core import Role
from alignedserve.errors import AlignedServeError, WireError
from alignedserve.protocol.events import LinkGap, Received
from alignedserve.protocol.membership import UNNUMBERED
from alignedserve.protocol.messages import (
    LAUNCHER,
    ROUTER,
    AskPages,
    Attempt,
    Cancel,
    Died,
    Heartbeat,
    Life,
    Member,
    Started,
    Submit,
)
from alignedserve.protocol.wire import Envelope, decode, encode
from alignedserve.shell.links import CUT_OFF, LinkFull, Links, Pulse
from tests.samples import request
from tests.shell.conftest import DEADLINE_S, MOST_BYTES, OURS, Start, beat_of, member, wait_for


class Raw:
    """Put frames of any kind into an inbox; all go over one connection, so that their order holds."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        OURS.parts.show(self._socket)
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._connected: set[str] = set()

    def __call__(self, links: Links, frame: bytes) -> None:
        if links.address not in self._connected:
            self._socket.connect(links.address)
            self._connected.add(links.address)
        self._socket.send(frame)

    def is_cut_off(self, within_s: float) -> bool:
        """Whether the other side has ended the connection, or does so now."""
        return self._ends.poll(int(within_s * 1000)) != 0

    def close(self) -> None:
        self._socket.disable_monitor()
        self._ends.close()
        self._socket.close()
        self._context.term()


@pytest.fixture
def raw() -> Iterator[Raw]:
    made = Raw()
    yield made
    made.close()


def frame(number: int, pages: int, *, sender: str = "worker", incarnation: int = 5) -> bytes:
    return encode(Envelope(sender, incarnation, number, AskPages(pages)))


def got(pages: int, sender: str = "worker", incarnation: int = 5) -> Received:
    return Received(sender, AskPages(pages), incarnation)


GAP = LinkGap("worker")


def test_what_a_frame_holds_is_known_before_it_is_read(start: Start, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose frame ends its reader is found out like one that a core fails at."""
    noted, at_reading = list[tuple[Attempt, ...]](), list[tuple[Attempt, ...]]()

    def read(frame: bytes, most_bytes: int) -> Envelope:
        at_reading.append(noted[-1])
        return decode(frame, most_bytes)

    monkeypatch.setattr("alignedserve.shell.links.decode", read)
    router = start(ROUTER)
    asked = request("r", attempt=3)
    raw(router, encode(Envelope("gateway", 5, 1, Submit(asked))))
    raw(router, encode(Envelope("gateway", 5, 2, AskPages(1))))
    events = list[Received | LinkGap]()
    while len(events) < 2:
        events += router.receive(DEADLINE_S, noted.append)
    assert at_reading == [(("r", 3),), ()]
    assert noted[-1] == (), "it is read"


def test_messages_arrive_in_order(start: Start) -> None:
    router, worker, second_worker = start(ROUTER), start("worker", 5), start("other", 6)
    for pages in range(500):
        worker.send(ROUTER, AskPages(pages))
        second_worker.send(ROUTER, AskPages(pages))
    events = wait_for(router, 1000)
    for name, incarnation in (("worker", 5), ("other", 6)):
        from_one = [event for event in events if isinstance(event, Received) and event.sender == name]
        assert from_one == [got(pages, name, incarnation) for pages in range(500)]
    assert len(events) == 1000, "no gaps"


def test_both_ways(start: Start) -> None:
    router, worker = start(ROUTER, 2), start("worker", 5)
    worker.send(ROUTER, AskPages(1))
    assert wait_for(router, 1) == [got(1)]
    router.connect("worker", worker.address)
    router.send("worker", AskPages(2))
    assert wait_for(worker, 1) == [Received(ROUTER, AskPages(2), 2)]


def test_an_unknown_member_gets_nothing(start: Start) -> None:
    router = start(ROUTER)
    router.send("stranger", AskPages(1))
    router.disconnect("stranger")


# --- Numbers and lives, with frames made by hand.


@pytest.mark.parametrize(
    ("frames", "events"),
    [
        ([(5, 1), (5, 2)], [got(1), got(2)]),
        ([(5, 1), (5, 3), (5, 4)], [got(1), GAP, got(3), got(4)]),
        ([(5, 4), (5, 5)], [GAP, got(4), got(5)]),
        ([(5, 1), (5, 1), (5, 2), (5, 1)], [got(1), got(2)]),  # a frame is repeated
        ([(5, 1), (5, 3), (5, 2), (5, 4)], [got(1), GAP, got(3), got(4)]),  # a frame comes late
        ([(5, 1), (4, 1), (5, 2)], [got(1), got(1, incarnation=4), got(2)]),  # each life counts for itself
        ([(5, 1), (5, 2), (6, 1), (6, 2)], [got(1), got(2), got(1, incarnation=6), got(2, incarnation=6)]),
        ([(5, 1), (6, 2)], [got(1), GAP, got(2, incarnation=6)]),
        ([(5, 1), (5, UNNUMBERED), (5, 2)], [got(1), got(0), got(2)]),  # an unnumbered frame does not count
    ],
)
def test_gaps_and_lives(
    start: Start,
    raw: Raw,
    frames: list[tuple[int, int]],
    events: list[Received | LinkGap],
) -> None:
    links = start(ROUTER)
    for incarnation, number in frames:
        raw(links, frame(number, number, incarnation=incarnation))
    end = got(1, "end", 1)
    raw(links, frame(1, 1, sender="end", incarnation=1))
    assert wait_for(links, len(events) + 1) == [*events, end]


def test_frames_of_a_life_before_the_one_that_was_met_are_dropped(start: Start, raw: Raw) -> None:
    links = start(ROUTER)
    links.connect("worker", "tcp://127.0.0.1:9", 6)
    for incarnation in (5, 6, 2**62):
        raw(links, frame(1, 1, incarnation=incarnation))
    raw(links, frame(2, 2, incarnation=6))
    heard = [got(1, incarnation=6), got(1, incarnation=2**62), got(2, incarnation=6)]
    assert wait_for(links, 3) == heard, "a large number makes nobody deaf to the others"


def test_garbage_is_logged_and_survived(start: Start, raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    links = start(ROUTER)
    garbage = [b"", b"\xff" * 40, b"GET / HTTP/1.1\r\n\r\n", frame(2, 2)[:-1], b"\x00" * (MOST_BYTES + 1)]
    with caplog.at_level(logging.WARNING, logger="alignedserve.links"):
        logging.getLogger("alignedserve").propagate = True
        raw(links, frame(1, 1))
        for frames in garbage:
            raw(links, frames)
        raw(links, frame(2, 2))
        assert wait_for(links, 2) == [got(1), got(2)]
    assert len(caplog.messages) == 3, "each reason is said once"
    assert all(message.startswith("router: a frame ") and "\n" not in message for message in caplog.messages)


def test_a_part_of_another_version_is_named_once(start: Start, raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    links, other = start(ROUTER), bytearray(frame(1, UNNUMBERED))
    other[1] += 1
    with caplog.at_level(logging.WARNING, logger="alignedserve.links"):
        logging.getLogger("alignedserve").propagate = True
        for _ in range(3):
            raw(links, bytes(other))
        raw(links, frame(1, 2))
        assert wait_for(links, 1) == [got(2)]
    [line] = caplog.messages
    assert line.startswith("router: a frame of 'worker' has version ")


@pytest.mark.parametrize("times", [1, CUT_OFF], ids=["just above the limit", "just below the cut-off"])
def test_a_frame_above_the_limit_is_refused_and_the_connection_lives(
    start: Start, raw: Raw, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    links, size = start(ROUTER), times * MOST_BYTES + (times == 1)
    with caplog.at_level(logging.WARNING, logger="alignedserve.links"):
        logging.getLogger("alignedserve").propagate = True
        raw(links, frame(1, 1))
        raw(links, bytes(size))
        raw(links, frame(2, 2))
        assert wait_for(links, 2) == [got(1), got(2)]
    assert caplog.messages == [f"router: a frame of {size} bytes exceeds the limit of {MOST_BYTES}"]
    assert not raw.is_cut_off(within_s=0)


def test_a_frame_beyond_the_cut_off_ends_its_connection_and_nothing_else(start: Start, raw: Raw) -> None:
    """The frame is never received as a whole: a few such frames would fill the memory."""
    links, worker = start(ROUTER), start("other", 6)
    worker.send(ROUTER, AskPages(1))
    raw(links, frame(1, 1))
    assert {event.sender for event in wait_for(links, 2)} == {"other", "worker"}
    raw(links, bytes(CUT_OFF * MOST_BYTES + 1))
    assert raw.is_cut_off(within_s=DEADLINE_S)
    worker.send(ROUTER, AskPages(2))
    start("late", 7).send(ROUTER, AskPages(3))
    arrived = wait_for(links, 2)
    assert sorted(arrived, key=lambda event: event.sender) == [got(3, "late", 7), got(2, "other", 6)]


def test_a_message_that_no_frame_can_hold_is_refused_and_leaves_a_gap(start: Start) -> None:
    router, worker = start(ROUTER), start("worker", 5)
    worker.send(ROUTER, AskPages(1))
    with pytest.raises(WireError, match="cannot be sent"):
        worker.send(ROUTER, AskPages(2**64))
    worker.send(ROUTER, AskPages(3))
    assert wait_for(router, 3) == [got(1), GAP, got(3)]


def test_a_frame_that_the_receiver_would_drop_is_not_sent(start: Start) -> None:
    router, worker = start(ROUTER), start("worker", 5)
    with pytest.raises(WireError, match="exceeds the limit of"):
        worker.send(ROUTER, Cancel("r" * MOST_BYTES, 0))
    worker.send(ROUTER, AskPages(1))
    assert wait_for(router, 2) == [GAP, got(1)]


# --- Waiting


def test_wake_ends_a_receive_from_another_thread(start: Start) -> None:
    links = start(ROUTER)
    waker = threading.Thread(target=links.wake)
    began = time.monotonic()
    waker.start()
    assert links.receive(DEADLINE_S) == []
    assert time.monotonic() - began < DEADLINE_S / 2
    waker.join()


def test_a_wake_before_the_receive_counts_once(start: Start) -> None:
    links = start(ROUTER)
    for _ in range(3):
        links.wake()
    began = time.monotonic()
    assert links.receive(DEADLINE_S) == []
    assert time.monotonic() - began < DEADLINE_S / 2
    assert links.receive(0.01) == []


def test_wakes_of_many_threads_lose_no_message(start: Start) -> None:
    router, worker = start(ROUTER), start("worker", 5)

    def wake_often() -> None:
        for _ in range(200):
            router.wake()

    wakers = [threading.Thread(target=wake_often) for _ in range(4)]
    for waker in wakers:
        waker.start()
    for pages in range(300):
        worker.send(ROUTER, AskPages(pages))
    assert wait_for(router, 300) == [got(pages) for pages in range(300)]
    for waker in wakers:
        waker.join()


def test_a_wake_may_come_after_the_end() -> None:
    """The thread of a signal does not know that its process is ending by itself."""
    links = Links(ROUTER, 1, "tcp://127.0.0.1:*", "tcp://127.0.0.1:9", 1000, OURS.parts)

    def wake_often() -> None:
        for _ in range(500):
            links.wake()

    wakers = [threading.Thread(target=wake_often) for _ in range(4)]
    for waker in wakers:
        waker.start()
    links.close()
    for waker in wakers:
        waker.join()
    links.wake()


def test_wake_within_a_wake(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal may arrive during the handler of the first; both wake."""
    links = start(ROUTER)
    send, signals = links._waker.send, ["the second"]

    def signalled(data: bytes) -> object:
        if signals:
            signals.pop()
            links.wake()
        return send(data)

    class Waker:
        closed, send = False, staticmethod(signalled)

    with monkeypatch.context() as patched:
        patched.setattr(links, "_waker", Waker)
        inside = threading.Thread(target=links.wake, daemon=True)
        inside.start()
        inside.join(DEADLINE_S)
        assert not inside.is_alive(), "it waits for itself"
    assert links.receive(DEADLINE_S) == []


@pytest.mark.parametrize("wait_s", [0.0004, 0.0009, 0.0105])
def test_a_receive_waits_as_long_as_it_should(start: Start, wait_s: float) -> None:
    """A receive that ended within the last millisecond would make a shell spin until its timer is due."""
    links = start(ROUTER)
    for _ in range(10):
        began = time.monotonic()
        assert links.receive(wait_s) == []
        assert time.monotonic() - began >= wait_s
    assert links.receive(0.0) == []
    assert links.receive(-1.0) == [], "what is overdue does not wait for ever"


# --- Heartbeats, and members that come and go


def test_the_pulse_reaches_the_router_again_and_again(start: Start) -> None:
    router, worker = start(ROUTER), start("worker", 5)
    pulse = beat_of(member(worker), router.address)
    try:
        beats = wait_for(router, 3)
    finally:
        pulse.stop()
    assert beats == [Received("worker", Heartbeat(member(worker)), 5)] * len(beats), "no gaps either"


def test_the_pulse_finds_a_router_that_starts_later_or_anew(start: Start) -> None:
    first = start(ROUTER, 1)
    worker, address = start("worker", 5), first.address
    first.close()
    pulse = beat_of(member(worker), address)
    try:
        second = start(ROUTER, 2, address)
        assert wait_for(second, 1)[0] == Received("worker", Heartbeat(member(worker)), 5)
        second.close()
        assert wait_for(start(ROUTER, 3, address), 1)[0] == Received("worker", Heartbeat(member(worker)), 5)
    finally:
        pulse.stop()


def test_the_pulse_stops_at_once_though_nobody_listens() -> None:
    began = time.monotonic()
    beat_of(Member("w", Role.POOL, "n", 1, "tcp://127.0.0.1:9"), "tcp://127.0.0.1:9", 3600.0).stop()
    assert time.monotonic() - began < DEADLINE_S


def test_a_peer_that_restarts_on_the_same_address_gets_messages_again(start: Start) -> None:
    first, worker = start(ROUTER, 1), start("worker", 5)
    worker.send(ROUTER, AskPages(1))
    assert wait_for(first, 1) == [got(1)]
    address = first.address
    first.close()
    second = start(ROUTER, 2, address)
    gone = send_until_heard(worker, second)
    assert gone[0] == GAP, "it has not heard the first one, and says so"
    worker.send(ROUTER, AskPages(-1))
    assert wait_for(second, 1)[-1] == got(-1)


def send_until_heard(sender: Links, receiver: Links) -> list[Received | LinkGap]:
    """Send until a frame arrives: frames before the connection stands again may be lost with the old connection."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        sender.send(ROUTER, AskPages(7))
        if heard := receiver.receive(0.05):
            return heard
    raise AssertionError("nothing arrived")


def test_a_sender_that_restarts_begins_anew(start: Start) -> None:
    router = start(ROUTER)
    for incarnation in (5, 6, 7):
        worker = start("worker", incarnation)
        worker.send(ROUTER, AskPages(1))
        worker.send(ROUTER, AskPages(2))
        worker.close()
        assert wait_for(router, 2) == [got(1, incarnation=incarnation), got(2, incarnation=incarnation)]


def test_a_new_address_of_a_member_takes_the_place_of_the_old_one(start: Start) -> None:
    router, old, new = start(ROUTER), start("old"), start("new")
    router.connect("worker", old.address)
    router.send("worker", AskPages(1))
    router.connect("worker", old.address)
    router.send("worker", AskPages(2))
    assert wait_for(old, 2) == [Received(ROUTER, AskPages(1), 1), Received(ROUTER, AskPages(2), 1)]
    router.connect("worker", new.address)
    router.send("worker", AskPages(3))
    assert wait_for(new, 1) == [Received(ROUTER, AskPages(3), 1)], "the numbers begin again with the link"


def test_a_link_to_the_same_address_that_is_made_anew_goes_on_counting(start: Start) -> None:
    """The receiver has not forgotten the numbers: frames from 1 on would count as late."""
    router, worker = start(ROUTER), start("worker", 5)
    for pages in (1, 2, 3):
        router.connect("worker", worker.address, 5)
        router.send("worker", AskPages(pages))
        assert wait_for(worker, 1) == [Received(ROUTER, AskPages(pages), 1)]
        router.disconnect("worker")


@pytest.mark.parametrize("late", [4, 5])
def test_the_address_of_an_earlier_life_comes_too_late(start: Start, late: int) -> None:
    """The old life's last heartbeat may be heard after the first heartbeat of the next life."""
    router, old, new = start(ROUTER), start("old"), start("new")
    router.connect("worker", old.address, 5)
    router.connect("worker", new.address, 6)
    router.connect("worker", old.address, late)
    router.send("worker", AskPages(1))
    assert wait_for(new, 1) == [Received(ROUTER, AskPages(1), 1)]


def test_what_was_said_last_still_goes_out(start: Start) -> None:
    router, worker = start(ROUTER), start("worker", 5)
    for pages in range(100):
        worker.send(ROUTER, AskPages(pages))
    worker.close()
    assert wait_for(router, 100) == [got(pages) for pages in range(100)]


def test_what_a_launcher_has_started_is_said_again_and_again_and_all_else_once(start: Start) -> None:
    router, first, second = start(ROUTER), Started(()), Started((Life("pool-0", Role.POOL, 1),))
    launcher = Pulse(LAUNCHER, 0, first, router.address, 0.01, OURS.launcher)
    try:
        assert wait_for(router, 3)[:3] == [Received(LAUNCHER, first)] * 3
        launcher.say(Died("worker", 5))
        launcher.change(second)
        said = wait_for(router, 1)
        while said[-2:] != [Received(LAUNCHER, second)] * 2:
            said += wait_for(router, 1)
    finally:
        launcher.stop()
    assert said.count(Received(LAUNCHER, Died("worker", 5))) == 1
    told = [event.message for event in said if isinstance(event, Received)]
    assert told.index(Died("worker", 5)) == told.index(second) - 1, "in its order"
    assert first not in told[told.index(second) :]


def test_an_address_that_is_taken_is_a_clear_error(start: Start) -> None:
    router = start(ROUTER)
    with pytest.raises(AlignedServeError, match=f"cannot listen on {router.address}: Address already in use"):
        Links("other", 1, router.address, router.address, MOST_BYTES, OURS.parts)


def test_a_full_link_is_said_and_leaves_a_gap(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.shell.links.MOST_QUEUED", 5)
    router = start(ROUTER)
    address = router.address
    router.close()
    worker = start("worker", 5)
    for _ in range(5):
        worker.send(ROUTER, AskPages(1))
    with pytest.raises(LinkFull, match="router takes no more frames: 5 are queued"):
        worker.send(ROUTER, AskPages(2))
    second = start(ROUTER, 2, address)
    assert wait_for(second, 5) == [got(1)] * 5
    _send_once_taken(worker, AskPages(3))
    assert wait_for(second, 2) == [GAP, got(3)]


def _send_once_taken(worker: Links, message: AskPages) -> None:
    """Send once there is room: ZeroMQ hears some time after a frame was read that there is room for another."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return worker.send(ROUTER, message)
        except LinkFull:
            assert time.monotonic() < deadline, "the link stays full"
